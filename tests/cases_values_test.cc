// Small inputs on which published MoE layers failed, about ids, weights, sums and contexts: cases
// 8-10, 16, 19, 20, 21 and 25. Legend: R ranks, T tokens, H hidden, I intermediate, E experts, K
// slots.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "layer_fixture.h"
#include "sanitized.h"

namespace megamoe::verify {
namespace {

constexpr std::int32_t kEmpty = -1;

/// Every token has these ids.
Problem problem_with_ids(std::vector<std::int64_t> tokens_per_rank, std::int32_t num_experts,
                         const std::vector<std::int32_t>& ids_K) {
  ProblemSpec spec = spec_with_tokens(std::move(tokens_per_rank));
  spec.hidden_dim = spec.intermediate_dim = channels(32);
  spec.num_experts = num_experts;
  spec.top_k = static_cast<std::int32_t>(ids_K.size());
  Problem problem = make_problem(spec);
  std::vector<std::int32_t> ids;
  for (std::int64_t token = 0; token < spec.num_tokens(); ++token) {
    ids.insert(ids.end(), ids_K.begin(), ids_K.end());
  }
  set_routing(problem, ids);
  return problem;
}

TEST(Case08DoubledIds, BothSlotsCount) {
  for (const int num_ranks : {1, 2, 8}) {
    for (const std::int64_t num_tokens : {1, 256, 257}) {
      SCOPED_TRACE(testing::Message() << "R=" << num_ranks << " T=" << num_tokens);
      std::vector<std::int64_t> tokens(num_ranks, 1);
      tokens[0] = num_tokens;
      const Problem problem = problem_with_ids(tokens, 96, {5, 88, 88, 65});
      const LayerTensors tensors = run_layer(problem, {});
      expect_right(problem, tensors, {});
      // The two slots have the same p and a, hence the same dw, and half of y each: with their
      // weights added up in one slot, the gradients of weights are the same sums.
      const HostTensor dweights = tensors.dweights.to_host();
      for (std::int64_t token = 0; token < num_tokens; ++token) {
        EXPECT_EQ(dweights.values[token * 4 + 1], dweights.values[token * 4 + 2]);
        EXPECT_NE(dweights.values[token * 4 + 1], 0.0);
      }
    }
  }
}

TEST(Case09EmptySlots, ContributeNothing) {
  // With -1 in place of a slot, everything else is what it is without that slot.
  const std::vector<std::int32_t> narrow = {3, 6};
  const std::vector<std::vector<std::int32_t>> wide = {
      {kEmpty, 3, 6}, {3, 6, kEmpty}, {3, kEmpty, 6}, {kEmpty, 3, kEmpty, 6, kEmpty}};
  for (const int num_ranks : {1, 2}) {
    Problem without = problem_with_ids(std::vector<std::int64_t>(num_ranks, 19), 8, narrow);
    for (std::size_t slot = 0; slot < without.weights_TK.size(); ++slot) {
      without.weights_TK[slot] = slot % 2 == 0 ? 0.75F : 0.375F;
    }
    const LayerTensors expected = run_layer(without, {});
    expect_right(without, expected, {});
    for (const std::vector<std::int32_t>& ids_K : wide) {
      SCOPED_TRACE(testing::PrintToString(ids_K));
      Problem with = problem_with_ids(std::vector<std::int64_t>(num_ranks, 19), 8, ids_K);
      for (std::size_t slot = 0; slot < with.weights_TK.size(); ++slot) {  // NaN where empty
        if (with.expert_ids_TK[slot] == 3) with.weights_TK[slot] = 0.75F;
        if (with.expert_ids_TK[slot] == 6) with.weights_TK[slot] = 0.375F;
      }
      LayerTensors tensors = run_layer(with, {});
      const HostTensor dweights = tensors.dweights.to_host();
      const HostTensor narrow_dweights = expected.dweights.to_host();
      std::size_t narrow_slot = 0;
      for (std::size_t slot = 0; slot < dweights.values.size(); ++slot) {
        const double wanted =
            with.expert_ids_TK[slot] == kEmpty ? 0.0 : narrow_dweights.values[narrow_slot++];
        EXPECT_EQ(dweights.values[slot], wanted);
        EXPECT_FALSE(std::signbit(dweights.values[slot]) && wanted == 0.0);
      }
      tensors.dweights = expected.dweights;
      EXPECT_EQ(differing_tensors(tensors, expected), "");
    }
  }
}

TEST(Case09EmptySlots, ATokenWithoutExpertsIsZero) {
  Problem problem = problem_with_ids({6, 5}, 8, {2, 7});
  std::vector<std::int32_t> ids = problem.expert_ids_TK;
  for (const std::int64_t token : {0, 4, 10}) ids[token * 2] = ids[token * 2 + 1] = kEmpty;
  set_routing(problem, ids);
  const LayerTensors tensors = run_layer(problem, {});
  expect_right(problem, tensors, {});
  for (const std::int64_t token : {0, 4, 10}) {
    const std::int64_t hidden = problem.spec.hidden_dim;
    EXPECT_TRUE(all_zero(tensors.y, token * hidden, hidden));
    EXPECT_TRUE(all_zero(tensors.dx, token * hidden, hidden));
    EXPECT_TRUE(all_zero(tensors.dweights, token * 2, 2));
  }
}

TEST(Case10BadIds, AreRefusedByValueAndPlaceOnEveryRank) {
  for (const std::int32_t bad : {8, -2, 1 << 30, std::numeric_limits<std::int32_t>::min()}) {
    for (const int num_ranks : {1, 2, 4}) {
      SCOPED_TRACE(testing::Message() << "id " << bad << " R=" << num_ranks);
      const Problem good = problem_with_ids(std::vector<std::int64_t>(num_ranks, 9), 8, {2, 7});
      Problem wrong = good;
      const std::int64_t token = good.spec.num_tokens() - 3;  // of the last rank: 9 - 3 = 6
      wrong.expert_ids_TK[token * 2 + 1] = bad;
      const LayerTensors tensors =
          run_sessions(good, {}, [&](RankSession& session, Communicator& group) {
            RankData data(wrong, {}, group.rank());
            const RawTensor untouched = data.tensors().y;
            std::vector<std::string> texts = {"expert_ids[6, 1]", std::to_string(bad), "0 to 7"};
            if (group.rank() != num_ranks - 1) {
              texts.push_back("rank " + std::to_string(num_ranks - 1) + ":");
            }
            expect_error(ErrorCode::expert_id_out_of_range, texts,
                         [&] { data.forward(session.layer()); });
            EXPECT_TRUE(data.tensors().y == untouched);
            const CallContext context = session.forward();  // still usable
            session.backward(context);
          });
      expect_right(good, tensors, {});
    }
  }
}

TEST(Case16TwoRanks, GiveThePlainSumOverAllTokens) {
  ProblemSpec spec = spec_with_tokens({48});
  const LayerTensors one = run_layer(make_problem(spec), {});
  spec.tokens_per_rank = {31, 17};
  const Problem problem = make_problem(spec);
  const LayerTensors two = run_layer(problem, {});
  EXPECT_EQ(differing_tensors(one, two), "");
  expect_right(problem, two, {});
}

TEST(Case19OtherTypes, AreRefusedByName) {
  MEGAMOE_ON_CPU_ONLY("it gives the layer host memory");
  const Problem problem = problem_with_ids({3, 3}, 8, {2, 7});
  run_sessions(problem, {}, [&](RankSession& session, Communicator&) {
    const auto expect_refusal = [&](const char* name, DType dtype, ErrorCode code,
                                    ConstTensorView ForwardInput::*tensor) {
      ForwardInput input = session.data().forward_input();
      (input.*tensor).dtype = dtype;
      expect_error(code, {name, to_string(dtype)},
                   [&] { session.layer().forward(input, session.data().forward_output()); });
    };
    const ErrorCode invalid = ErrorCode::invalid_argument;
    expect_refusal("expert_ids", DType::int64, invalid, &ForwardInput::expert_ids);
    expect_refusal("expert_ids", DType::fp32, invalid, &ForwardInput::expert_ids);
    expect_refusal("weights", DType::fp64, invalid, &ForwardInput::weights);
    expect_refusal("weights", DType::bf16, invalid, &ForwardInput::weights);
    expect_refusal("x", DType::fp32, invalid, &ForwardInput::x);
    expect_refusal("x", DType::fp16, ErrorCode::unsupported, &ForwardInput::x);
    const CallContext context = session.forward();
    session.backward(context);
  });
}

/// One token of ones in channel 0, which expert j multiplies by `scales[j]`; other channels are 0.
/// g = 64, of which the sigmoid is 1 in fp32, and u = 1/64: a = 1 exactly, and so are both parts of
/// dx / scales[j].
Problem scaling_problem(const std::vector<float>& scales, const std::vector<float>& weights_K,
                        const std::vector<std::int32_t>& ids_K) {
  ProblemSpec spec;
  spec.tokens_per_rank = {1};
  spec.hidden_dim = spec.intermediate_dim = channels(1);
  spec.num_experts = static_cast<std::int32_t>(scales.size());
  spec.top_k = static_cast<std::int32_t>(ids_K.size());
  spec.routing = RoutingPattern::one_expert;
  Problem problem = make_problem(spec);
  problem.expert_ids_TK = ids_K;
  problem.weights_TK = weights_K;
  const auto expert_elements = static_cast<std::size_t>(spec.hidden_dim * spec.intermediate_dim);
  for (std::vector<bf16>* tensor :
       {&problem.x_TH, &problem.dy_TH, &problem.gate_EIH, &problem.up_EIH, &problem.down_EHI}) {
    std::fill(tensor->begin(), tensor->end(), bf16{0});
  }
  problem.x_TH[0] = problem.dy_TH[0] = to_bf16(1.0F);
  for (std::size_t expert = 0; expert < scales.size(); ++expert) {
    problem.gate_EIH[expert * expert_elements] = to_bf16(64.0F);
    problem.up_EIH[expert * expert_elements] = to_bf16(1.0F / 64.0F);
    problem.down_EHI[expert * expert_elements] = to_bf16(scales[expert]);
  }
  return problem;
}

/// `first` in channel 0, 0 in the others.
std::vector<double> only_first(double first) {
  std::vector<double> values(channels(1));
  values[0] = first;
  return values;
}

TEST(Case20SlotSum, IsMadeInFp32AndRoundedOnce) {
  // 256 + 7 * 1 = 263, halfway between 262 and 264: the even one is 264. A bf16 sum stays at 256.
  // dx is the same sum, doubled.
  const Problem rows = scaling_problem({256, 1, 1, 1, 1, 1, 1, 1}, std::vector<float>(8, 1.0F),
                                       {0, 1, 2, 3, 4, 5, 6, 7});
  const Problem weights =
      scaling_problem({1}, {256, 1, 1, 1, 1, 1, 1, 1}, std::vector<std::int32_t>(8, 0));
  for (const Problem& problem : {rows, weights}) {
    const LayerTensors tensors = run_layer(problem, {});
    EXPECT_EQ(tensors.y.to_host().values, only_first(264.0));
    EXPECT_EQ(tensors.dx.to_host().values, only_first(528.0));
    expect_right(problem, tensors, {});
  }
}

TEST(Case20SlotSum, IsAChainOfFusedMultiplyAdds) {
  // The product of the first slot is rounded; the second slot takes it off exactly and leaves the
  // rounding error: (1 + 2^-23) (1 + 2^-7) = 1 + 2^-7 + 2^-23 + 2^-30. Unfused, the sum would be 0.
  constexpr float kWeight = 1.0F + 0x1p-23F;
  const Problem problem =
      scaling_problem({1.0F + 0x1p-7F, -1.0F - 0x1p-7F}, {kWeight, kWeight}, {0, 1});
  EXPECT_EQ(run_layer(problem, {}).y.to_host().values, only_first(-0x1p-30));
}

TEST(Case21Reruns, AHundredStepsGiveEqualBits) {
  for (const int num_ranks : {1, 4}) {
    SCOPED_TRACE(num_ranks);
    ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(num_ranks, 64 / num_ranks));
    spec.routing = RoutingPattern::duplicates;
    const Problem problem = make_problem(spec);
    RunOptions options;
    options.num_threads = 3;
    run_sessions(problem, options, [&](RankSession& session, Communicator&) {
      LayerTensors first;
      for (int step = 0; step < less_if_sanitized(100, 10); ++step) {
        const CallContext context = session.forward();
        session.backward(context);
        if (step == 0) first = session.tensors();
        EXPECT_EQ(differing_tensors(session.tensors(), first), "") << "step " << step;
      }
    });
  }
}

TEST(Case25CallsInFlight, ThreeForwardsThenThreeBackwards) {
  for (const MemoryMode mode : {MemoryMode::saved, MemoryMode::recompute}) {
    RunOptions options;
    options.memory_mode = mode;
    std::vector<Problem> problems;
    std::vector<LayerTensors> alone;
    const std::vector<std::vector<std::int64_t>> tokens = {{20, 9}, {0, 30}, {30, 17}};
    for (std::size_t i = 0; i < 3; ++i) {
      ProblemSpec spec = spec_with_tokens(tokens[i]);
      spec.seed = 100 + i;
      problems.push_back(make_problem(spec));
      alone.push_back(run_layer(problems[i], options));
    }
    const std::vector<std::vector<int>> orders = {{0, 1, 2}, {2, 1, 0}, {1, 2, 0}};
    std::vector<std::vector<LayerTensors>> tensors(3, std::vector<LayerTensors>(2));
    run_ranks(topology_of(problems.front().spec, options), [&](Communicator& threads) {
      const BackendGroup backend_group(threads, options);
      Communicator& group = backend_group.get();
      const LayerConfig config = layer_config(problems[2].spec, options);  // the largest max T
      Workspace workspace(config, group);
      MoeLayer layer(config, group, workspace);
      std::vector<RankData> data;
      for (const Problem& problem : problems) data.emplace_back(problem, options, group.rank());
      for (const std::vector<int>& order : orders) {
        std::vector<CallContext> contexts;
        for (RankData& one : data) contexts.push_back(one.forward(layer));
        for (const int i : order) data[i].backward(layer, contexts[i]);
        for (int i = 0; i < 3; ++i) tensors[i][group.rank()] = data[i].tensors();
        group.barrier("all ranks have stored their results", 60);
        if (group.rank() != 0) continue;
        for (int i = 0; i < 3; ++i) {
          EXPECT_EQ(differing_tensors(concatenate(tensors[i]), alone[i]), "") << "call " << i;
        }
      }
    });
  }
}

TEST(Case25CallsInFlight, OneForwardServesSeveralBackwards) {
  const Problem problem = make_problem(spec_with_tokens({20, 9}));
  run_sessions(problem, {}, [&](RankSession& session, Communicator&) {
    const CallContext context = session.forward();
    session.backward(context);
    const LayerTensors first = session.tensors();
    { const CallContext unused = session.forward(); }
    session.backward(context);
    EXPECT_EQ(differing_tensors(session.tensors(), first), "");
  });
}

}  // namespace
}  // namespace megamoe::verify
