// Inputs that move rows between ranks in every way, for any number of ranks: what tests of layers
// on several hosts run.
#pragma once

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

/// A problem for any number of ranks, and how it is run.
struct Case {
  const char* name;
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

inline Case routed(const char* name, RoutingPattern routing, std::vector<std::int64_t> pattern,
                   RunOptions options = {}) {
  const auto problem = [=](int num_ranks) {
    ProblemSpec spec = spec_of(tokens(num_ranks, pattern));
    spec.routing = routing;
    return make_problem(spec);
  };
  return {name, problem, options};
}

/// ids(token, slot) for all tokens of all ranks.
inline Case with_ids(const char* name, std::vector<std::int64_t> pattern, std::int32_t top_k,
                     const std::function<std::int32_t(std::int64_t, std::int32_t)>& id_of) {
  const auto problem = [=](int num_ranks) {
    Problem made = make_problem(spec_of(tokens(num_ranks, pattern), 16, top_k));
    std::vector<std::int32_t> ids(made.expert_ids_TK.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = id_of(static_cast<std::int64_t>(i) / top_k, static_cast<std::int32_t>(i) % top_k);
    }
    set_routing(made, ids);
    return made;
  };
  return {name, problem, {}};
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
      {"odd_sizes",
       [](int num_ranks) {
         ProblemSpec spec = spec_of(tokens(num_ranks, {11, 20}), 8, 2);
         spec.hidden_dim = channels(45);
         spec.intermediate_dim = channels(176);
         return make_problem(spec);
       }},
      routed("recomputed", uniform, {21, 12}, with(MemoryMode::recompute)),
      routed("partly_saved", uniform, {21, 12}, with(MemoryMode::saved, 17)),
      routed("fp32_gradients", uniform, {21, 12}, with(WeightGradientMode::store_fp32)),
      routed("main_grad", uniform, {21, 12}, with(WeightGradientMode::accumulate_fp32)),
      activated("gelu_erf", ActivationKind::gelu_erf),
      activated("ungated", ActivationKind::relu2),
  };
  return cases;
}

/// Three forward calls, then their backward calls in another order; before each call every rank's
/// workspace is filled with NaN.
inline LayerTensors run_contexts_in_any_order(const Problem& problem, const RunOptions& options) {
  return run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
    const auto poison_all = [&] {
      group.barrier("before poison", 60.0);
      poison(session.workspace());
      group.barrier("after poison", 60.0);
    };
    std::vector<CallContext> contexts;
    for (int i = 0; i < 3; ++i) {
      poison_all();
      contexts.push_back(session.forward());
    }
    for (const int i : {1, 2, 0}) {
      poison_all();
      session.backward(contexts[i]);
    }
  });
}

}  // namespace megamoe::verify
