#include "layer/workspace.h"

#include <string>
#include <vector>

#include "layer/agreement.h"
#include "layer/backend.h"
#include "layer/fingerprint.h"

namespace megamoe {
namespace {

/// The first step of construction: no rank may go on to allocate with sizes of its own.
WorkspaceBytes agreed_bytes(const LayerConfig& config, Communicator& group) {
  agree_on_config(config, group);
  return workspace_bytes(config, group.topology());
}

/// Throws on every rank what one of them met. Returns rank 0's `id`, on every rank.
std::uint64_t agree_on_memory(Communicator& group, const LocalOutcome& outcome, std::uint64_t id,
                              double deadline_s) {
  struct Record {
    LocalOutcome outcome;
    std::uint64_t id;
  };
  const Record mine{outcome, id};
  std::vector<Record> all(group.size());
  group.all_gather(&mine, all.data(), sizeof(mine), "the allocation of a workspace", deadline_s);
  for (int rank = 0; rank < group.size(); ++rank) {
    throw_if_failed(all[rank].outcome, rank, group.rank());
  }
  return all[0].id;
}

}  // namespace

WorkspaceDims workspace_dims(const LayerConfig& config, int num_ranks) {
  const MoeShape& shape = config.shape;
  return {{num_ranks, shape.num_experts, shape.top_k},
          shape.max_tokens,
          shape.hidden_dim,
          shape.intermediate_dim,
          resolved_row_capacity(config, num_ranks)};
}

WorkspaceBytes workspace_bytes(const LayerConfig& config, int num_ranks) {
  validate(config, num_ranks);
  return backend_bytes(config.backend, workspace_dims(config, num_ranks), 1);
}

WorkspaceBytes workspace_bytes(const LayerConfig& config, const Topology& topology) {
  const int num_ranks = topology.num_ranks();
  validate(config, num_ranks);
  return backend_bytes(config.backend, workspace_dims(config, num_ranks), topology.num_hosts());
}

Workspace::Impl::Impl(const LayerConfig& config, Communicator& group)
    : communicator(group),
      backend(config.backend),
      bytes(agreed_bytes(config, group)),
      symmetric(group.allocate_symmetric(bytes.symmetric, config.entry_deadline_s)) {
  const LocalOutcome outcome = outcome_of([&] { memory = make_workspace_memory(config, *this); });
  // An address is an identity as long as the workspace lives.
  group_id = agree_on_memory(group, outcome, reinterpret_cast<std::uintptr_t>(this),
                             config.entry_deadline_s);
}

Workspace::Workspace(const LayerConfig& config, Communicator& communicator)
    : impl_(std::make_unique<Impl>(config, communicator)) {}
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;
Workspace::~Workspace() = default;

WorkspaceBytes Workspace::bytes() const { return impl_->bytes; }

void poison(Workspace& workspace) { workspace.impl().memory->poison(); }

}  // namespace megamoe
