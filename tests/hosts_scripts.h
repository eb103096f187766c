// What ranks on several hosts do beside one forward and one backward call: calls in other orders,
// which must give the bits of one rank that does the same, and what must be refused on every rank
// and leave the group usable. For ranks as threads and as processes.
#pragma once

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "hosts_cases.h"
#include "layer/workspace.h"
#include "layer_fixture.h"

namespace megamoe::verify {

// ---- Calls in other orders -------------------------------------------------------------------

/// One rank of a script: a layer that is large enough for all of its problems, a second one on the
/// same workspace, and the data of each problem.
struct ScriptRank {
  MoeLayer& layer;
  MoeLayer& second_layer;
  Workspace& workspace;
  Communicator& group;
  std::vector<RankData>& data;

  /// Fills every rank's workspace with NaN.
  void poison_all() const {
    group.barrier("before poison", 60.0);
    poison(workspace);
    group.barrier("after poison", 60.0);
  }
};

struct Script {
  std::string name;
  /// For any number of ranks. All have the same layer but for the number of tokens.
  std::function<std::vector<Problem>(int num_ranks)> problems;
  std::function<void(const ScriptRank&)> run;
  RunOptions options = {};
};

inline LayerConfig script_config(const std::vector<Problem>& problems, const RunOptions& options) {
  ProblemSpec spec = problems.front().spec;
  for (const Problem& problem : problems) {
    if (problem.spec.max_tokens() > spec.max_tokens()) spec = problem.spec;
  }
  return layer_config(spec, options);
}

/// What this rank holds of each problem in the end. `group` is the backend's. Collective.
inline std::vector<LayerTensors> run_script(const Script& script,
                                            const std::vector<Problem>& problems,
                                            const RunOptions& options, Communicator& group) {
  const LayerConfig config = script_config(problems, options);
  Workspace workspace(config, group);
  MoeLayer layer(config, group, workspace);
  MoeLayer second_layer(config, group, workspace);
  std::vector<RankData> data;
  for (const Problem& problem : problems) data.emplace_back(problem, options, group.rank());
  const ScriptRank rank{layer, second_layer, workspace, group, data};
  rank.poison_all();
  script.run(rank);
  std::vector<LayerTensors> tensors;
  for (const RankData& one : data) tensors.push_back(one.tensors());
  return tensors;
}

/// The same on one rank, which has all tokens and experts.
inline std::vector<LayerTensors> script_on_one_rank(const Script& script,
                                                    std::vector<Problem> problems) {
  for (Problem& problem : problems) problem = on_one_rank(std::move(problem));
  std::vector<LayerTensors> tensors;
  run_ranks(1, [&](Communicator& alone) {
    const BackendGroup group(alone, script.options);
    tensors = run_script(script, problems, script.options, group.get());
  });
  return tensors;
}

inline std::vector<Problem> script_problems(
    int num_ranks, const std::vector<std::vector<std::int64_t>>& patterns) {
  std::vector<Problem> problems;
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    ProblemSpec spec = spec_of(tokens(num_ranks, patterns[i]));
    spec.seed = 100 + i;
    problems.push_back(make_problem(spec));
  }
  return problems;
}

inline std::vector<Script> all_scripts() {
  const auto three_calls = [](int num_ranks) {
    return script_problems(num_ranks, {{20, 9}, {0, 30}, {30, 17}});
  };
  const auto contexts_in_any_order = [](const ScriptRank& rank) {
    for (const std::vector<int>& order :
         {std::vector<int>{0, 1, 2}, std::vector<int>{2, 1, 0}, std::vector<int>{1, 2, 0}}) {
      std::vector<CallContext> contexts;
      for (RankData& one : rank.data) {
        rank.poison_all();
        contexts.push_back(one.forward(rank.layer));
      }
      for (const int i : order) {
        rank.poison_all();
        rank.data[i].backward(rank.layer, contexts[i]);
      }
    }
  };
  std::vector<Script> scripts = {
      {"contexts_in_any_order", three_calls, contexts_in_any_order},
      {"contexts_in_any_order_recomputed", three_calls, contexts_in_any_order,
       with(MemoryMode::recompute)},
      {"two_backwards_of_one_context",
       [](int num_ranks) {
         return script_problems(num_ranks, {{20, 9}});
       },
       [](const ScriptRank& rank) {
         const CallContext context = rank.data[0].forward(rank.layer);
         rank.data[0].backward(rank.layer, context);
         { const CallContext unused = rank.data[0].forward(rank.layer); }
         rank.poison_all();
         rank.data[0].backward(rank.layer, context);
       }},
      // main_grad, preset to 3, holds 3 + g1 + g2 then.
      {"two_backwards_accumulate",
       [](int num_ranks) {
         return script_problems(num_ranks, {{20, 9}});
       },
       [](const ScriptRank& rank) {
         const CallContext context = rank.data[0].forward(rank.layer);
         for (int i = 0; i < 2; ++i) rank.data[0].backward(rank.layer, context);
       },
       with(WeightGradientMode::accumulate_fp32)},
      // All experts busy, then most without rows, in memory that is full of NaN.
      {"busy_then_empty",
       [](int num_ranks) {
         std::vector<Problem> problems = script_problems(num_ranks, {{24, 24}, {24, 24}});
         std::vector<std::int32_t> ids = problems[1].expert_ids_TK;
         for (std::size_t slot = 0; slot < ids.size(); ++slot) ids[slot] = slot % 5 == 0 ? 11 : -1;
         set_routing(problems[1], ids);
         return problems;
       },
       [](const ScriptRank& rank) {
         for (const int i : {0, 1, 0, 1}) {
           rank.poison_all();
           rank.data[i].backward(rank.layer, rank.data[i].forward(rank.layer));
         }
       }},
      {"empty_ranks_50_times",
       [](int num_ranks) {
         return script_problems(num_ranks, {{0, 16}, {16, 0}, {0}});
       },
       [](const ScriptRank& rank) {
         for (int i = 0; i < 50; ++i) {
           for (RankData& one : rank.data) one.backward(rank.layer, one.forward(rank.layer));
         }
       }},
      {"forwards_without_a_backward",
       [](int num_ranks) {
         return script_problems(num_ranks, {{12, 7}});
       },
       [](const ScriptRank& rank) {
         for (int i = 0; i < 100; ++i) {
           const CallContext unused = rank.data[0].forward(rank.layer);
         }
         rank.data[0].backward(rank.layer, rank.data[0].forward(rank.layer));
       }},
      // Of two equal problems the first has rows far from each other: at odd addresses where the
      // backend under test takes them, else at the next that it takes. Then its dy is one row for
      // all tokens, as the second's dy, which is stored in full.
      {"spread_and_expanded_rows",
       [](int num_ranks) {
         std::vector<Problem> problems = script_problems(num_ranks, {{20, 9}});
         problems.push_back(problems[0]);
         for (std::size_t i = 0; i < problems[1].dy_TH.size(); ++i) {
           problems[1].dy_TH[i] = problems[1].dy_TH[i % problems[1].spec.hidden_dim];
         }
         problems.push_back(problems[1]);
         return problems;
       },
       [](const ScriptRank& rank) {
         const bool takes_any = default_backend() == Backend::cpu;
         RankData& spread = rank.data[0];
         spread.spread_x(takes_any ? 1025 : 1032, takes_any ? 1 : 0);
         spread.spread_dy(takes_any ? 71 : 72, takes_any ? 3 : 0);
         rank.data[1].spread_dy(0, 0);
         for (RankData& one : rank.data) one.backward(rank.layer, one.forward(rank.layer));
         if (rank.data[1].tensors() != rank.data[2].tensors()) {
           throw std::logic_error(
               "an expanded dy gives other bits than one that is stored in full");
         }
       }},
      // On the CUDA backend the data of each problem have a stream of their own.
      {"two_layers_on_one_workspace",
       [](int num_ranks) {
         return script_problems(num_ranks, {{12, 30}, {30, 12}});
       },
       [](const ScriptRank& rank) {
         const CallContext first = rank.data[0].forward(rank.layer);
         const CallContext second = rank.data[1].forward(rank.second_layer);
         rank.data[0].backward(rank.layer, first);
         rank.data[1].backward(rank.second_layer, second);
       }},
  };
  return scripts;
}

/// Every script, by ranks that are threads.
inline void expect_threads_give_the_bits_of_one_rank(const Layout& layout) {
  for (const Script& script : all_scripts()) {
    SCOPED_TRACE(script.name);
    const std::vector<Problem> problems = script.problems(layout.num_ranks());
    const std::vector<LayerTensors> one_rank = script_on_one_rank(script, problems);
    std::vector<std::vector<LayerTensors>> tensors_R(layout.num_ranks());
    run_ranks(even_topology(layout.num_hosts, layout.ranks_per_host), [&](Communicator& threads) {
      const BackendGroup group(threads, script.options);
      tensors_R[threads.rank()] = run_script(script, problems, script.options, group.get());
    });
    for (std::size_t i = 0; i < problems.size(); ++i) {
      std::vector<LayerTensors> of_problem_R;
      for (const auto& tensors : tensors_R) of_problem_R.push_back(tensors[i]);
      EXPECT_EQ(differing_tensors(concatenate(of_problem_R), one_rank[i]), "") << "problem " << i;
    }
  }
}

// ---- What is refused -------------------------------------------------------------------------

/// "" where `work` throws an Error with this code whose message contains every one of `texts`; what
/// it does else.
template <class Work>
std::string unless_refused(ErrorCode code, const std::vector<std::string>& texts,
                           const Work& work) {
  const std::optional<Error> error = error_of(work);
  if (!error) return "no error about " + texts.front() + "; ";
  std::string wrong;
  if (error->code() != code) wrong = std::string("not ") + to_string(code) + ": ";
  for (const std::string& text : texts) {
    if (std::string(error->what()).find(text) == std::string::npos)
      wrong += "no '" + text + "' in ";
  }
  return wrong.empty() ? "" : wrong + error->what() + "; ";
}

/// A rank of a group that is used again and again; `group` is the backend's, `options` its.
struct RefusalRank {
  Communicator& group;
  RunOptions options;

  /// "" where a step of `data`, which has run before, gives the same bits again.
  static std::string unless_usable(MoeLayer& layer, RankData& data) {
    const LayerTensors before = data.tensors();
    data.backward(layer, data.forward(layer));
    const std::string different = differing_tensors(data.tensors(), before);
    return different.empty() ? "" : "other bits afterwards: " + different + "; ";
  }
};

/// A layer that has made one step of `good`, and must refuse a forward call of `bad`, which must
/// write nothing.
inline std::string unless_call_is_refused(const RefusalRank& rank, const Problem& good,
                                          const LayerConfig& config, const Problem& bad,
                                          ErrorCode code, const std::vector<std::string>& texts) {
  Workspace workspace(config, rank.group);
  MoeLayer layer(config, rank.group, workspace);
  RankData data(good, rank.options, rank.group.rank());
  data.backward(layer, data.forward(layer));
  std::string wrong;
  for (int i = 0; i < 2; ++i) {
    RankData refused(bad, rank.options, rank.group.rank());
    const RawTensor untouched = refused.tensors().y;
    wrong += unless_refused(code, texts, [&] { refused.forward(layer); });
    if (refused.tensors().y != untouched) wrong += "y was written; ";
  }
  return wrong + RefusalRank::unless_usable(layer, data);
}

inline std::string unless_bad_ids_are_refused(const RefusalRank& rank) {
  const int last = rank.group.size() - 1;
  const Problem good = make_problem(spec_of(std::vector<std::int64_t>(last + 1, 6)));
  const LayerConfig config = layer_config(good.spec, rank.options);
  std::string wrong;
  for (const std::int32_t id : {16, -2, 1 << 30}) {
    Problem bad = good;
    bad.expert_ids_TK[(last * 6 + 1) * 3 + 1] = id;  // the last rank's token 1, slot 1
    std::vector<std::string> texts = {"expert_ids[1, 1]", std::to_string(id)};
    if (rank.group.rank() != last) texts.push_back("rank " + std::to_string(last) + ":");
    wrong +=
        unless_call_is_refused(rank, good, config, bad, ErrorCode::expert_id_out_of_range, texts);
  }
  return wrong;
}

/// The last rank receives exactly as many rows as it may, then one more.
inline std::string unless_a_row_too_many_is_refused(const RefusalRank& rank) {
  const int last = rank.group.size() - 1;
  const ProblemSpec spec = spec_of(std::vector<std::int64_t>(last + 1, 16), 8, 1);
  Problem full = make_problem(spec);
  std::vector<std::int32_t> ids(16 * (last + 1), -1);
  std::fill_n(ids.begin(), 12, 7);
  set_routing(full, ids);
  Problem over = full;
  ids[15] = 7;
  set_routing(over, ids);
  LayerConfig config = layer_config(spec, rank.options);
  config.row_capacity = 12;
  return unless_call_is_refused(
      rank, full, config, over, ErrorCode::capacity_exceeded,
      {"13 rows", "capacity is 12", "row_capacity", "rank " + std::to_string(last)});
}

inline std::string unless_too_many_tokens_are_refused(const RefusalRank& rank) {
  const int last = rank.group.size() - 1;
  std::vector<std::int64_t> tokens_R(last + 1, 8);
  const Problem good = make_problem(spec_of(tokens_R));
  tokens_R[last] = 12;
  const Problem bad = make_problem(spec_of(tokens_R));
  return unless_call_is_refused(rank, good, layer_config(good.spec, rank.options), bad,
                                ErrorCode::invalid_argument,
                                {"x has 12 tokens", "max_tokens is 8"});
}

inline std::string unless_different_calls_are_refused(const RefusalRank& rank) {
  const int last = rank.group.size() - 1;
  const Problem problem = make_problem(spec_of(std::vector<std::int64_t>(last + 1, 6)));
  const LayerConfig config = layer_config(problem.spec, rank.options);
  Workspace workspace(config, rank.group);
  MoeLayer layer(config, rank.group, workspace);
  RankData data(problem, rank.options, rank.group.rank());
  const CallContext context = data.forward(layer);
  data.backward(layer, context);
  RankData other(problem, rank.options, rank.group.rank());
  const std::string wrong = unless_refused(
      ErrorCode::config_mismatch, {"different calls", "rank " + std::to_string(last)}, [&] {
        if (rank.group.rank() == last) {
          other.backward(layer, context);
        } else {
          other.forward(layer);
        }
      });
  return wrong + RefusalRank::unless_usable(layer, data);
}

/// Workspaces and layers for which the last rank has another configuration.
inline std::string unless_different_layers_are_refused(const RefusalRank& rank) {
  const int last = rank.group.size() - 1;
  const Problem problem = make_problem(spec_of(std::vector<std::int64_t>(last + 1, 8)));
  const LayerConfig base = layer_config(problem.spec, rank.options);
  Workspace workspace(base, rank.group);
  MoeLayer layer(base, rank.group, workspace);
  RankData data(problem, rank.options, rank.group.rank());
  data.backward(layer, data.forward(layer));
  const std::pair<const char*, std::function<void(LayerConfig&)>> changes[] = {
      {"row_capacity", [](LayerConfig& config) { config.row_capacity = 9; }},
      {"top_k", [](LayerConfig& config) { config.shape.top_k = 1; }},
      {"hidden_dim", [](LayerConfig& config) { config.shape.hidden_dim = 128; }},
      {"num_experts", [](LayerConfig& config) { config.shape.num_experts = 8; }},
      {"weight_gradient_mode",
       [](LayerConfig& config) { config.weight_gradient_mode = WeightGradientMode::store_fp32; }},
  };
  std::string wrong;
  for (const auto& [member, change] : changes) {
    LayerConfig config = base;
    if (rank.group.rank() == last) change(config);
    const std::vector<std::string> texts = {member, "rank 0", "rank " + std::to_string(last)};
    wrong += unless_refused(ErrorCode::config_mismatch, texts,
                            [&] { const Workspace other(config, rank.group); });
    wrong += unless_refused(ErrorCode::config_mismatch, texts,
                            [&] { const MoeLayer other(config, rank.group, workspace); });
  }
  return wrong + RefusalRank::unless_usable(layer, data);
}

struct Refusal {
  const char* name;
  std::string (*run)(const RefusalRank&);
};
inline constexpr Refusal kRefusals[] = {
    {"bad ids", unless_bad_ids_are_refused},
    {"a row too many", unless_a_row_too_many_is_refused},
    {"too many tokens", unless_too_many_tokens_are_refused},
    {"different calls", unless_different_calls_are_refused},
    {"different layers", unless_different_layers_are_refused},
};

}  // namespace megamoe::verify
