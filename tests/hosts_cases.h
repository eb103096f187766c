// Inputs that move rows between ranks in every way, for any number of ranks: what tests of layers
// on several hosts run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "layer/workspace.h"
#include "layer_fixture.h"

namespace megamoe::verify {

/// Hosts x ranks of a host.
struct Layout {
  int num_hosts;
  int ranks_per_host;
  [[nodiscard]] int num_ranks() const { return num_hosts * ranks_per_host; }
};
inline std::string name_of(const Layout& layout) {
  return std::to_string(layout.num_hosts) + "x" + std::to_string(layout.ranks_per_host);
}

/// The same tokens on one rank, which has all experts: what several ranks write, one after the
/// other, has these bits.
inline Problem on_one_rank(Problem problem) {
  problem.spec.tokens_per_rank = {problem.spec.num_tokens()};
  return problem;
}

/// `count` rows of a tensor, along its first dimension.
inline RawTensor part_of(const RawTensor& whole, std::int64_t first, std::int64_t count) {
  if (whole.shape.empty()) return whole;
  RawTensor part = whole;
  part.shape[0] = count;
  const auto row_bytes =
      static_cast<std::int64_t>(whole.bytes.size()) / std::max<std::int64_t>(1, whole.shape[0]);
  part.bytes.assign(whole.bytes.begin() + first * row_bytes,
                    whole.bytes.begin() + (first + count) * row_bytes);
  return part;
}

/// What rank `rank` of the problem's ranks writes of it.
inline LayerTensors part_of(const LayerTensors& whole, const ProblemSpec& spec, int rank) {
  const std::int64_t first_token = spec.first_token(rank);
  const std::int64_t num_tokens = spec.tokens_per_rank[rank];
  const std::int64_t num_experts = spec.num_experts / spec.num_ranks();
  LayerTensors part;
  for (RawTensor LayerTensors::*tensor :
       {&LayerTensors::y, &LayerTensors::dx, &LayerTensors::dweights}) {
    part.*tensor = part_of(whole.*tensor, first_token, num_tokens);
  }
  for (RawTensor LayerTensors::*tensor :
       {&LayerTensors::dgate, &LayerTensors::dup, &LayerTensors::ddown}) {
    part.*tensor = part_of(whole.*tensor, rank * num_experts, num_experts);
  }
  return part;
}

/// A problem for any number of ranks, and how it is run.
struct Case {
  std::string name;
  std::function<Problem(int num_ranks)> problem;
  RunOptions options = {};
};

inline ProblemSpec spec_of(std::vector<std::int64_t> tokens_per_rank, std::int32_t num_experts = 16,
                           std::int32_t top_k = 3) {
  ProblemSpec spec = spec_with_tokens(std::move(tokens_per_rank));
  spec.num_experts = num_experts;
  spec.top_k = top_k;
  return spec;
}

/// `pattern` repeated over the ranks.
inline std::vector<std::int64_t> tokens(int num_ranks, const std::vector<std::int64_t>& pattern) {
  std::vector<std::int64_t> tokens_R;
  for (int rank = 0; rank < num_ranks; ++rank) tokens_R.push_back(pattern[rank % pattern.size()]);
  return tokens_R;
}

inline Case routed(std::string name, RoutingPattern routing, std::vector<std::int64_t> pattern,
                   RunOptions options = {}) {
  const auto problem = [=](int num_ranks) {
    ProblemSpec spec = spec_of(tokens(num_ranks, pattern));
    spec.routing = routing;
    return make_problem(spec);
  };
  return {std::move(name), problem, options};
}

/// ids(token, slot) for all tokens of all ranks.
inline Case with_ids(std::string name, std::vector<std::int64_t> pattern, std::int32_t top_k,
                     const std::function<std::int32_t(std::int64_t, std::int32_t)>& id_of,
                     std::int32_t num_experts = 16) {
  const auto problem = [=](int num_ranks) {
    Problem made = make_problem(spec_of(tokens(num_ranks, pattern), num_experts, top_k));
    std::vector<std::int32_t> ids(made.expert_ids_TK.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = id_of(static_cast<std::int64_t>(i) / top_k, static_cast<std::int32_t>(i) % top_k);
    }
    set_routing(made, ids);
    return made;
  };
  return {std::move(name), problem, {}};
}

/// `change` is made to the problem of `other`.
inline Case changed(std::string name, const Case& other,
                    const std::function<void(Problem&)>& change) {
  const auto problem = [=](int num_ranks) {
    Problem made = other.problem(num_ranks);
    change(made);
    return made;
  };
  return {std::move(name), problem, other.options};
}

/// Few tokens of 8 experts with these channels.
inline Case sized(std::string name, std::int64_t hidden_dim, std::int64_t intermediate_dim) {
  const auto problem = [=](int num_ranks) {
    ProblemSpec spec = spec_of(tokens(num_ranks, {3, 5}), 8, 2);
    spec.hidden_dim = channels(hidden_dim);
    spec.intermediate_dim = channels(intermediate_dim);
    return make_problem(spec);
  };
  return {std::move(name), problem, {}};
}

inline Case activated(const char* name, ActivationKind kind) {
  const auto problem = [=](int num_ranks) {
    ProblemSpec spec = spec_of(tokens(num_ranks, {9, 4}));
    spec.activation = {kind, 1.0F};
    return make_problem(spec);
  };
  return {name, problem, {}};
}

inline RunOptions with(MemoryMode mode, std::int64_t saved_rows = 0) {
  RunOptions options;
  options.memory_mode = mode;
  options.saved_row_capacity = saved_rows;
  return options;
}

inline RunOptions with(WeightGradientMode mode) {
  RunOptions options;
  options.weight_gradient_mode = mode;
  options.initial_gradient = 3.0F;
  return options;
}

inline std::int32_t doubled_among_others(std::int64_t /*token*/, std::int32_t slot) {
  constexpr std::int32_t kIds[] = {5, 88, 88, 65};
  return kIds[slot];
}

inline std::vector<Case> all_cases() {
  using enum RoutingPattern;
  std::vector<Case> cases = {
      // A rank or a whole host without tokens; without any.
      routed("empty_ranks", uniform, {0, 16}),
      routed("full_first", uniform, {16, 0}),
      routed("empty_hosts", uniform, {0, 0, 0, 0, 7, 9, 1, 3}),
      routed("no_tokens", uniform, {0}),
      routed("uneven", uniform, {5, 12, 1, 100}),
      routed("tile_edges", uniform, {1, 2, 7, 8, 16, 32, 63, 64}),
      routed("tile_edges_beyond", uniform, {65, 127, 128, 129}),
      routed("tile_edges_7_8", uniform, {7, 8}),
      routed("tile_edges_16_32", uniform, {16, 32}),
      routed("tile_edges_63_64", uniform, {63, 64}),
      routed("tile_edges_128_129", uniform, {128, 129}),
      routed("tile_edges_257", uniform, {257, 3}),
      routed("very_uneven", uniform, {1, 300}),
      routed("skewed", skewed, {33, 20}),
      routed("one_expert", one_expert, {17, 30}),
      routed("duplicates", duplicates, {9, 31}),
      routed("holes", holes, {40, 21}),
      routed("ties", ties, {13}),
      // Every token to the first rank; to the last; only to the own host's or only to others'.
      with_ids("all_to_rank_0", {6, 11}, 2, [](auto, auto slot) { return slot; }),
      with_ids("all_to_the_last", {6, 11}, 2, [](auto, auto slot) { return 14 + slot; }),
      with_ids(
          "to_all_hosts", {6, 11}, 16,
          [](auto token, auto slot) { return static_cast<std::int32_t>((token + slot) % 16); }),
      with_ids("all_slots_one_expert", {4, 7}, 4,
               [](auto token, auto) { return static_cast<std::int32_t>(token % 16); }),
      with_ids("some_experts_empty", {8, 24}, 2,
               [](auto token, auto slot) {
                 return static_cast<std::int32_t>(1 + 2 * ((token + slot) % 4));
               }),
      with_ids("all_empty", {8, 3}, 2, [](auto, auto) { return -1; }),
      with_ids("one_slot", {8, 3}, 1,
               [](auto token, auto) { return static_cast<std::int32_t>((token * 5) % 16); }),
      with_ids(
          "counts_0_8_0_24", {16}, 1, [](auto token, auto) { return token % 4 == 0 ? 2 : 6; }, 8),
      with_ids("doubled_among_others", {1, 256}, 4, doubled_among_others, 96),
      with_ids("doubled_among_others_257", {257, 1}, 4, doubled_among_others, 96),
      with_ids("first_slot_empty", {9, 14}, 3,
               [](auto token, auto slot) {
                 return slot == 0 ? -1 : static_cast<std::int32_t>((token * 3 + slot * 7) % 16);
               }),
      with_ids("last_slot_empty", {9, 14}, 3,
               [](auto token, auto slot) {
                 return slot == 2 ? -1 : static_cast<std::int32_t>((token * 3 + slot * 7) % 16);
               }),
      // Weights of 256 and seven ones for each token: the sum of its slots is made in fp32.
      changed("slot_sum",
              with_ids("", {4, 7}, 8,
                       [](auto token, auto slot) {
                         return static_cast<std::int32_t>((token + 2 * slot) % 16);
                       }),
              [](Problem& problem) {
                for (std::size_t slot = 0; slot < problem.weights_TK.size(); ++slot) {
                  problem.weights_TK[slot] = slot % 8 == 0 ? 256.0F : 1.0F;
                }
              }),
      sized("odd_sizes", 45, 176),
      sized("hidden_2880", 2880, 176),
      sized("hidden_7176", 7176, 64),
      sized("intermediate_704", 176, 704),
      sized("intermediate_1408", 64, 1408),
      routed("recomputed", uniform, {21, 12}, with(MemoryMode::recompute)),
      routed("partly_saved", uniform, {21, 12}, with(MemoryMode::saved, 17)),
      routed("fp32_gradients", uniform, {21, 12}, with(WeightGradientMode::store_fp32)),
      routed("main_grad", uniform, {21, 12}, with(WeightGradientMode::accumulate_fp32)),
      activated("gelu_erf", ActivationKind::gelu_erf),
      activated("ungated", ActivationKind::relu2),
  };
  // Each expert in turn has no rows.
  for (std::int32_t empty = 0; empty < 8; ++empty) {
    cases.push_back(with_ids(
        "expert_" + std::to_string(empty) + "_empty", {6, 5}, 2,
        [=](auto token, auto slot) {
          const auto other = static_cast<std::int32_t>((token + 3 * slot) % 7);
          return other < empty ? other : other + 1;
        },
        8));
  }
  // 128, 130 and 65 rows, of experts on different hosts; then one of them has other weights.
  const Case row_groups = with_ids("row_groups", {170, 153}, 1, [](auto token, auto) {
    return token < 128 ? 5 : token < 258 ? 9 : token < 323 ? 14 : -1;
  });
  cases.push_back(row_groups);
  cases.push_back(changed("row_groups_other_weights", row_groups, [](Problem& problem) {
    for (std::vector<bf16>* tensor : {&problem.gate_EIH, &problem.up_EIH, &problem.down_EHI}) {
      const std::size_t size = tensor->size() / 16;
      std::reverse(tensor->begin() + 9 * size, tensor->begin() + 10 * size);
    }
  }));
  const Case uneven = routed("", uniform, {11, 20});
  cases.push_back(changed("gate_of_zeros", uneven, [](Problem& problem) {
    std::fill(problem.gate_EIH.begin(), problem.gate_EIH.end(), bf16{0});
  }));
  cases.push_back(changed("up_of_zeros", uneven, [](Problem& problem) {
    std::fill(problem.up_EIH.begin(), problem.up_EIH.end(), bf16{0});
  }));
  return cases;
}

}  // namespace megamoe::verify
