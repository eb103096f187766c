#include "layer/workspace.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "layer/fingerprint.h"

namespace megamoe {
namespace {

/// The first step of construction: no rank may go on to allocate with sizes of its own.
WorkspaceBytes agreed_bytes(const LayerConfig& config, Communicator& group) {
  agree_on_config(config, group);
  return workspace_bytes(config, group.size());
}

int resolved_num_threads(const LayerConfig& config, int num_ranks) {
  if (config.num_threads > 0) return config.num_threads;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, cores / num_ranks);
}

std::byte* allocate_local(std::int64_t bytes) {
  return static_cast<std::byte*>(::operator new[](static_cast<std::size_t>(bytes),
                                                  std::align_val_t{RegionAllocator::kAlignment},
                                                  std::nothrow));
}

/// Throws on every rank when one of them got no memory. Returns rank 0's `id`, on every rank.
std::uint64_t agree_on_memory(Communicator& group, bool allocated, std::int64_t bytes,
                              std::uint64_t id, double deadline_s) {
  struct Record {
    std::uint64_t id;
    std::uint64_t allocated;
  };
  const Record mine{id, allocated ? 1U : 0U};
  std::vector<Record> all(group.size());
  group.all_gather(&mine, all.data(), sizeof(mine), "the allocation of a workspace", deadline_s);
  for (int rank = 0; rank < group.size(); ++rank) {
    if (all[rank].allocated == 0) {
      throw Error(ErrorCode::out_of_memory, "rank " + std::to_string(rank) +
                                                " could not allocate a workspace of " +
                                                std::to_string(bytes) + " bytes");
    }
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
  const WorkspaceDims dims = workspace_dims(config, num_ranks);
  return {symmetric_layout(dims).bytes, local_layout(dims).bytes};
}

Workspace::Impl::Impl(const LayerConfig& config, Communicator& group)
    : communicator(group),
      bytes(agreed_bytes(config, group)),
      symmetric(group.allocate_symmetric(bytes.symmetric, config.entry_deadline_s)),
      local(allocate_local(bytes.local)),
      threads(resolved_num_threads(config, group.size())),
      scratch(threads.num_threads()) {
  // An address is an identity as long as the workspace lives.
  group_id = agree_on_memory(group, local != nullptr, bytes.local,
                             reinterpret_cast<std::uintptr_t>(this), config.entry_deadline_s);
  plan_scratch.reserve(workspace_dims(config, group.size()).routing);
}

Workspace::Workspace(const LayerConfig& config, Communicator& communicator)
    : impl_(std::make_unique<Impl>(config, communicator)) {}
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;
Workspace::~Workspace() = default;

WorkspaceBytes Workspace::bytes() const { return impl_->bytes; }

void poison(Workspace& workspace) {
  const Workspace::Impl& impl = workspace.impl();
  constexpr int kNan = 0xff;  // a NaN in bf16, fp32 and fp64; -1 as an integer
  std::memset(impl.symmetric->peer(impl.communicator.rank()), kNan, impl.bytes.symmetric);
  std::memset(impl.local.get(), kNan, impl.bytes.local);
}

}  // namespace megamoe
