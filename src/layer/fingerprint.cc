#include "layer/fingerprint.h"

#include <array>
#include <bit>
#include <vector>

#include "layer/agreement.h"

namespace megamoe {
namespace {

struct Member {
  const char* name;
  std::int64_t value;
};

/// All that must be equal. Threads and deadlines are a rank's own affair.
std::array<Member, 12> members_of(const LayerConfig& config, int num_ranks) {
  return {{
      {"shape.max_tokens", config.shape.max_tokens},
      {"shape.hidden_dim", config.shape.hidden_dim},
      {"shape.intermediate_dim", config.shape.intermediate_dim},
      {"shape.num_experts", config.shape.num_experts},
      {"shape.top_k", config.shape.top_k},
      {"activation.kind", static_cast<std::int64_t>(config.activation.kind)},
      {"activation.limit (bits)", std::bit_cast<std::int32_t>(config.activation.limit)},
      {"memory_mode", static_cast<std::int64_t>(config.memory_mode)},
      {"overlap", static_cast<std::int64_t>(config.overlap)},
      {"weight_gradient_mode", static_cast<std::int64_t>(config.weight_gradient_mode)},
      {"backend", static_cast<std::int64_t>(config.backend)},
      {"row_capacity", resolved_row_capacity(config, num_ranks)},
  }};
}

}  // namespace

void agree_on_config(const LayerConfig& config, Communicator& communicator) {
  struct Record {
    LocalOutcome outcome;
    std::array<std::int64_t, std::tuple_size_v<decltype(members_of(config, 1))>> values;
  };
  const int num_ranks = communicator.size();
  Record mine{};
  mine.outcome = outcome_of([&] { validate(config, num_ranks); });
  if (mine.outcome.failed == 0) {
    const auto members = members_of(config, num_ranks);
    std::transform(members.begin(), members.end(), mine.values.begin(),
                   [](const Member& member) { return member.value; });
  }

  // A deadline that is itself refused must not bound the wait in which peers are told.
  const double deadline_s =
      mine.outcome.failed == 0 ? config.entry_deadline_s : LayerConfig{}.entry_deadline_s;
  std::vector<Record> all(num_ranks);
  communicator.all_gather(&mine, all.data(), sizeof(Record), "the construction of a layer",
                          deadline_s);
  for (int rank = 0; rank < num_ranks; ++rank) {
    throw_if_failed(all[rank].outcome, rank, communicator.rank());
  }
  const auto members = members_of(config, num_ranks);
  for (int rank = 1; rank < num_ranks; ++rank) {
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (all[rank].values[i] == all[0].values[i]) continue;
      throw Error(ErrorCode::config_mismatch,
                  std::string("ranks differ in ") + members[i].name + ": rank 0 has " +
                      std::to_string(all[0].values[i]) + ", rank " + std::to_string(rank) +
                      " has " + std::to_string(all[rank].values[i]));
    }
  }
}

}  // namespace megamoe
