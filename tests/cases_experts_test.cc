// Small inputs on which published MoE layers failed, about experts and ranks without rows: cases
// 1-4, 6, 12 and 17. Legend: R ranks, T tokens, H hidden, I intermediate, E experts, K slots.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "layer/workspace.h"
#include "layer_fixture.h"
#include "sparse_memory.h"

namespace megamoe::verify {
namespace {

constexpr WeightGradientMode kGradientModes[] = {WeightGradientMode::store_bf16,
                                                 WeightGradientMode::store_fp32,
                                                 WeightGradientMode::accumulate_fp32};

/// E = 4, K = 1, 32 tokens over the ranks, with these counts of rows.
Problem counted_problem(int num_ranks, const std::vector<std::int64_t>& counts_E) {
  ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(num_ranks, 32 / num_ranks));
  spec.num_experts = 4;
  spec.top_k = 1;
  Problem problem = make_problem(spec);
  std::vector<std::int32_t> ids = ids_from_counts(counts_E);
  ids.resize(32, -1);
  set_routing(problem, ids);
  return problem;
}

/// Runs in every gradient mode; empty experts get exact zeros, or keep main_grad bit by bit.
void expect_right_in_all_gradient_modes(const Problem& problem) {
  for (const WeightGradientMode mode : kGradientModes) {
    RunOptions options;
    options.weight_gradient_mode = mode;
    options.initial_gradient = -0.0F;  // adding a zero would turn it into +0
    const LayerTensors tensors = run_layer(problem, options);
    expect_right(problem, tensors, options);
    const std::int64_t size = problem.spec.hidden_dim * problem.spec.intermediate_dim;
    for (std::int32_t expert = 0; expert < problem.spec.num_experts; ++expert) {
      const auto& ids = problem.expert_ids_TK;
      if (std::find(ids.begin(), ids.end(), expert) != ids.end()) continue;
      for (const RawTensor* gradient : {&tensors.dgate, &tensors.dup, &tensors.ddown}) {
        EXPECT_TRUE(all_zero(*gradient, expert * size, size)) << "expert " << expert;
        if (mode != WeightGradientMode::accumulate_fp32) continue;
        const float* values = reinterpret_cast<const float*>(gradient->bytes.data());
        EXPECT_TRUE(std::signbit(values[expert * size])) << "main_grad was touched";
      }
    }
  }
}

TEST(Case01EmptyExperts, CountsZeroEightZeroTwentyFour) {
  for (const int num_ranks : {1, 2, 4}) {
    SCOPED_TRACE(num_ranks);
    expect_right_in_all_gradient_modes(counted_problem(num_ranks, {0, 8, 0, 24}));
  }
}

TEST(Case01EmptyExperts, EveryExpertEmptyInTurn) {
  for (const int num_ranks : {1, 2}) {
    for (std::size_t empty = 0; empty < 4; ++empty) {
      SCOPED_TRACE(testing::Message() << "R=" << num_ranks << " empty expert " << empty);
      std::vector<std::int64_t> counts_E = {10, 7, 9, 6};
      counts_E[empty] = 0;
      expect_right_in_all_gradient_modes(counted_problem(num_ranks, counts_E));
    }
  }
}

TEST(Case01EmptyExperts, AllEmpty) {
  for (const int num_ranks : {1, 2, 4}) {
    SCOPED_TRACE(num_ranks);
    const Problem problem = counted_problem(num_ranks, {0, 0, 0, 0});
    expect_right_in_all_gradient_modes(problem);
    const LayerTensors tensors = run_layer(problem, {});
    EXPECT_TRUE(all_zero(tensors.y, 0, tensors.y.num_elements()));
    EXPECT_TRUE(all_zero(tensors.dx, 0, tensors.dx.num_elements()));
  }
}

TEST(Case02RecycledMemory, BusyThenEmptyExpertsWithEveryBufferFullOfNan) {
  for (const int num_ranks : {1, 2}) {
    for (const MemoryMode mode : {MemoryMode::saved, MemoryMode::recompute}) {
      SCOPED_TRACE(testing::Message() << "R=" << num_ranks << " " << static_cast<int>(mode));
      const Problem busy = counted_problem(num_ranks, {8, 8, 8, 8});
      const Problem sparse = counted_problem(num_ranks, {0, 3, 0, 24});
      RunOptions options;
      options.memory_mode = mode;
      std::vector<LayerTensors> busy_R(num_ranks);
      std::vector<LayerTensors> sparse_R(num_ranks);
      run_ranks(topology_of(busy.spec, options), [&](Communicator& group) {
        RankSession session(busy, options, group);
        const auto run = [&](const Problem& problem) {
          RankData data(problem, options, group.rank());
          const auto poison_all = [&] {
            group.barrier("poison", 60);
            poison(session.workspace());
            group.barrier("poison", 60);
          };
          poison_all();
          const CallContext context = data.forward(session.layer());
          poison_all();  // a call must not find anything of the one before it
          data.backward(session.layer(), context);
          return data.tensors();
        };
        busy_R[group.rank()] = run(busy);
        sparse_R[group.rank()] = run(sparse);
        EXPECT_EQ(differing_tensors(run(busy), busy_R[group.rank()]), "");
      });
      expect_right(busy, concatenate(busy_R), options);
      expect_right(sparse, concatenate(sparse_R), options);
    }
  }
}

TEST(Case03RanksWithoutTokens, FiftySteps) {
  for (const std::vector<std::int64_t>& tokens :
       {std::vector<std::int64_t>{0, 16}, {16, 0}, {0, 0}, {0, 5, 0, 9}}) {
    SCOPED_TRACE(testing::PrintToString(tokens));
    const Problem problem = make_problem(spec_with_tokens(tokens));
    const auto run_steps = [&](int num_steps) {
      return run_sessions(problem, {}, [&](RankSession& session, Communicator&) {
        for (int step = 0; step < num_steps; ++step) {
          const CallContext context = session.forward();
          session.backward(context);
        }
      });
    };
    const LayerTensors tensors = run_steps(50);
    expect_right(problem, tensors, {});
    EXPECT_EQ(differing_tensors(tensors, run_steps(1)), "");
  }
}

TEST(Case04AllTokensToOneRank, OfBothRanks) {
  Problem problem = make_problem(spec_with_tokens({40, 24}));
  std::vector<std::int32_t> ids = problem.expert_ids_TK;
  for (std::int32_t& id : ids) id %= 4;  // rank 0 owns experts 0 to 3
  set_routing(problem, ids);
  const LayerTensors tensors = run_layer(problem, {});
  expect_right(problem, tensors, {});
  const std::int64_t half = tensors.dup.num_elements() / 2;
  EXPECT_TRUE(all_zero(tensors.dgate, half, half));
  EXPECT_TRUE(all_zero(tensors.dup, half, half));
  EXPECT_TRUE(all_zero(tensors.ddown, half, half));
}

TEST(Case06RowGroups, ChangingOneExpertChangesOnlyItsRows) {
  ProblemSpec spec = spec_with_tokens({323});
  spec.num_experts = 3;
  spec.top_k = 1;
  Problem problem = make_problem(spec);
  const std::vector<std::int64_t> counts_E = {128, 130, 65};
  set_routing(problem, ids_from_counts(counts_E));
  const LayerTensors before = run_layer(problem, {});
  expect_right(problem, before, {});
  const std::int64_t expert_size = spec.hidden_dim * spec.intermediate_dim;
  for (std::int64_t changed = 0; changed < 3; ++changed) {
    SCOPED_TRACE(changed);
    Problem other = problem;
    for (std::vector<bf16>* weights : {&other.gate_EIH, &other.up_EIH, &other.down_EHI}) {
      const auto first = weights->begin() + changed * expert_size;
      std::reverse(first, first + expert_size);
    }
    const LayerTensors after = run_layer(other, {});
    const auto changed_slices = [&](const RawTensor& left, const RawTensor& right,
                                    std::int64_t slice_bytes, std::int64_t count) {
      std::vector<bool> changes;
      for (std::int64_t slice = 0; slice < count; ++slice) {
        changes.push_back(std::memcmp(&left.bytes[slice * slice_bytes],
                                      &right.bytes[slice * slice_bytes], slice_bytes) != 0);
      }
      return changes;
    };
    std::vector<bool> tokens_of_changed;
    for (const std::int32_t id : problem.expert_ids_TK) tokens_of_changed.push_back(id == changed);
    std::vector<bool> only_changed(3, false);
    only_changed[changed] = true;
    EXPECT_EQ(changed_slices(before.y, after.y, spec.hidden_dim * 2, 323), tokens_of_changed);
    EXPECT_EQ(changed_slices(before.dx, after.dx, spec.hidden_dim * 2, 323), tokens_of_changed);
    EXPECT_EQ(changed_slices(before.dweights, after.dweights, 4, 323), tokens_of_changed);
    EXPECT_EQ(changed_slices(before.dup, after.dup, expert_size * 2, 3), only_changed);
    EXPECT_EQ(changed_slices(before.ddown, after.ddown, expert_size * 2, 3), only_changed);
  }
}

/// One of a rank's expert tensors, and its gradient. E = 512 of 5120 x 2048 are 10.7 GB a tensor;
/// these experts are as far apart, but 64 x 64 each: they have the same offsets and touch only a
/// few pages. Around the last one's gradient lie guards.
class FarExperts {
 public:
  static constexpr std::int64_t kStride = std::int64_t{5120} * 2048;

  /// The weights of the last of `experts`, and zeros for the others.
  explicit FarExperts(const ConstTensorView& experts)
      : last_(experts.sizes[0] - 1),
        size_(experts.sizes[1] * experts.sizes[2]),
        weights_(experts.sizes[0] * kStride * sizeof(bf16)),
        gradients_(experts.sizes[0] * kStride * sizeof(float)) {
    if (!usable()) return;
    std::copy_n(static_cast<const bf16*>(experts.data) + last_ * size_, size_,
                weights_.as<bf16>() + last_ * kStride);
    std::fill_n(last_gradient() - kGuard, kGuard, kPattern);
    std::fill_n(last_gradient() + size_, kGuard, kPattern);
  }

  [[nodiscard]] bool usable() const { return weights_.usable() && gradients_.usable(); }
  /// `view`, of experts that lie together, on these.
  [[nodiscard]] ConstTensorView weights(ConstTensorView view) const {
    view.data = weights_.as<bf16>();
    view.strides[0] = kStride;
    return view;
  }
  [[nodiscard]] TensorView gradient(TensorView view) const {
    view.data = gradients_.as<float>();
    view.strides[0] = kStride;
    return view;
  }

  /// `last`: what the last expert's gradient must be.
  void expect_gradient(const std::byte* last) const {
    const float* gradient = last_gradient();
    EXPECT_EQ(std::memcmp(gradient, last, size_ * sizeof(float)), 0);
    EXPECT_EQ(std::count(gradient - kGuard, gradient, kPattern), kGuard);
    EXPECT_EQ(std::count(gradient + size_, gradient + size_ + kGuard, kPattern), kGuard);
    EXPECT_EQ(gradient[-kStride], 0.0F);  // the expert before it
  }

 private:
  static constexpr std::int64_t kGuard = 1024;
  static constexpr float kPattern = 12345.0F;
  [[nodiscard]] float* last_gradient() const { return gradients_.as<float>() + last_ * kStride; }

  std::int64_t last_;
  std::int64_t size_;
  SparseMemory weights_;
  SparseMemory gradients_;
};

TEST(Case12HugeExpertWeights, TheLastExpertLiesBeyondTwoToThe31Elements) {
  MEGAMOE_ON_CPU_ONLY("it gives the layer host memory");
  for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{9}, {5, 9}}) {
    SCOPED_TRACE(testing::PrintToString(tokens));
    ProblemSpec spec = spec_with_tokens(tokens);
    spec.num_experts = 512;
    spec.top_k = 1;
    spec.routing = RoutingPattern::one_expert;  // the last one
    const Problem problem = make_problem(spec);
    const std::int64_t experts_per_rank = spec.num_experts / spec.num_ranks();
    ASSERT_GT((experts_per_rank - 1) * FarExperts::kStride, std::int64_t{1} << 31);

    RunOptions options;  // stored gradients would write zeros to every expert
    options.weight_gradient_mode = WeightGradientMode::accumulate_fp32;
    const LayerTensors dense = run_layer(problem, options);
    std::atomic<bool> has_room = true;
    const LayerTensors tensors =
        run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
          ForwardInput input = session.data().forward_input();
          BackwardInput backward_input = session.data().backward_input();
          BackwardOutput output = session.data().backward_output();
          const FarExperts gate(input.experts.gate), up(input.experts.up), down(input.experts.down);
          if (!gate.usable() || !up.usable() || !down.usable()) has_room = false;
          group.barrier("address space", 60);
          if (!has_room) return;
          input.experts = {gate.weights(input.experts.gate), up.weights(input.experts.up),
                           down.weights(input.experts.down)};
          backward_input.experts = input.experts;
          output.experts = {gate.gradient(output.experts.gate), up.gradient(output.experts.up),
                            down.gradient(output.experts.down)};
          const CallContext context =
              session.layer().forward(input, session.data().forward_output());
          session.layer().backward(context, backward_input, output);

          const std::int64_t last_expert = (group.rank() + 1) * experts_per_rank - 1;
          const std::int64_t offset_bytes =
              last_expert * spec.hidden_dim * spec.intermediate_dim * std::int64_t{sizeof(float)};
          gate.expect_gradient(&dense.dgate.bytes[offset_bytes]);
          up.expect_gradient(&dense.dup.bytes[offset_bytes]);
          down.expect_gradient(&dense.ddown.bytes[offset_bytes]);
        });
    if (!has_room) GTEST_SKIP() << "no 97 GB of address space";
    EXPECT_TRUE(tensors.y == dense.y);
    EXPECT_TRUE(tensors.dx == dense.dx);
    EXPECT_TRUE(tensors.dweights == dense.dweights);
  }
}

TEST(Case17GateAndUp, AreCheckedApart) {
  for (const int num_ranks : {1, 2}) {
    Problem problem = make_problem(spec_with_tokens(std::vector<std::int64_t>(num_ranks, 33)));
    expect_right(problem, {});  // judges dgate and dup each by itself
    Problem without_gate = problem;
    std::fill(without_gate.gate_EIH.begin(), without_gate.gate_EIH.end(), bf16{});
    const LayerTensors gateless = run_layer(without_gate, {});
    expect_right(without_gate, gateless, {});
    EXPECT_TRUE(all_zero(gateless.y, 0, gateless.y.num_elements()));  // silu(0) u
    EXPECT_FALSE(all_zero(gateless.dgate, 0, gateless.dgate.num_elements()));
    EXPECT_TRUE(all_zero(gateless.dup, 0, gateless.dup.num_elements()));

    Problem without_up = problem;
    std::fill(without_up.up_EIH.begin(), without_up.up_EIH.end(), bf16{});
    const LayerTensors upless = run_layer(without_up, {});
    expect_right(without_up, upless, {});
    EXPECT_TRUE(all_zero(upless.dgate, 0, upless.dgate.num_elements()));
    EXPECT_FALSE(all_zero(upless.dup, 0, upless.dup.num_elements()));
  }
}

}  // namespace
}  // namespace megamoe::verify
