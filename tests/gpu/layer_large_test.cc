// Sizes that need the memory of a device. Legend: T tokens, E experts.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "gpu/layer_device.h"

namespace megamoe::verify {
namespace {

using cuda::check;

/// T tokens that repeat the first 64, so that rows of the large call must have the bits of the
/// small one.
TEST(CudaCase11ManyRows, OffsetsPassTwoToThe31Elements) {
  constexpr std::int64_t kTokens = 40000, kHidden = 7168, kSmall = 64;
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (free < std::size_t{60} << 30) GTEST_SKIP() << "needs 60 GB of device memory";
  ProblemSpec spec = spec_with_tokens({kSmall});
  spec.hidden_dim = kHidden;
  spec.top_k = 8;
  const Problem small = make_problem(spec);
  Problem large = small;
  large.spec.tokens_per_rank = {kTokens};
  const auto repeat = [&](auto& values, std::int64_t width) {
    values.resize(kTokens * width);
    for (std::int64_t t = kSmall; t < kTokens; ++t) {
      std::copy_n(&values[t % kSmall * width], width, &values[t * width]);
    }
  };
  repeat(large.x_TH, kHidden);
  repeat(large.dy_TH, kHidden);
  repeat(large.expert_ids_TK, spec.top_k);
  repeat(large.weights_TK, spec.top_k);
  const TestStream stream;
  const auto run = [&](const Problem& problem, const DeviceProblem& tensors) {
    OneRank rank(cuda_config(problem.spec));
    const CallContext call =
        rank.layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
    rank.layer.backward(call, tensors.backward_input(), tensors.backward_output(), stream);
    rank.layer.check(stream);
  };
  const DeviceProblem of_small(small), of_large(large);
  run(small, of_small);
  run(large, of_large);
  const std::vector<bf16> y = of_small.y.download(), dx = of_small.dx.download();
  for (const std::int64_t first : {std::int64_t{0}, std::int64_t{19968}, kTokens - kSmall}) {
    EXPECT_TRUE(same_bits(of_large.y.download(first * kHidden, kSmall * kHidden), y)) << first;
    EXPECT_TRUE(same_bits(of_large.dx.download(first * kHidden, kSmall * kHidden), dx)) << first;
  }
}

/// Weights of E experts in guarded buffers; tokens go to the last expert alone. Its results must
/// have the bits of a layer of that one expert.
TEST(CudaCase12HugeExpertWeights, TheLastExpertLiesBeyondTwoToThe31Elements) {
  constexpr std::int64_t kExperts = 512, kHidden = 5120, kIntermediate = 2048, kTokens = 40;
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (free < std::size_t{80} << 30) GTEST_SKIP() << "needs 80 GB of device memory";
  ProblemSpec spec = spec_with_tokens({kTokens});
  spec.hidden_dim = kHidden;
  spec.intermediate_dim = kIntermediate;
  spec.num_experts = 1;
  spec.top_k = 1;
  const Problem one = make_problem(spec);
  const TestStream stream;
  const DeviceProblem alone(one);
  {
    OneRank rank(cuda_config(spec));
    const CallContext call =
        rank.layer.forward(alone.forward_input(), alone.forward_output(), stream);
    rank.layer.backward(call, alone.backward_input(), alone.backward_output(), stream);
    rank.layer.check(stream);
  }
  constexpr std::int64_t kExpertSize = kHidden * kIntermediate;
  constexpr std::int64_t kLast = (kExperts - 1) * kExpertSize;
  constexpr std::int64_t kGuard = 4096;
  const auto place_last = [&](const OnDevice<bf16>& all, const OnDevice<bf16>& last) {
    check(cudaMemcpy(all.data() + kLast, last.data(), kExpertSize * 2, cudaMemcpyDeviceToDevice),
          "placing an expert");
  };
  const OnDevice<bf16> gate(kExperts * kExpertSize), up(kExperts * kExpertSize),
      down(kExperts * kExpertSize);
  place_last(gate, alone.gate);
  place_last(up, alone.up);
  place_last(down, alone.down);
  const OnDevice<bf16> dgate(kExperts * kExpertSize + kGuard), dup(kExperts * kExpertSize + kGuard),
      ddown(kExperts * kExpertSize + kGuard);
  Problem moved = one;
  moved.spec.num_experts = kExperts;
  std::fill(moved.expert_ids_TK.begin(), moved.expert_ids_TK.end(), kExperts - 1);
  const OnDevice<std::int32_t> ids(moved.expert_ids_TK);
  const OnDevice<bf16> y(kTokens * kHidden), dx(kTokens * kHidden);
  const OnDevice<float> dweights(kTokens);
  const auto view = [&](const OnDevice<bf16>& tensor, std::int64_t rows, std::int64_t columns) {
    return tensor.view({kExperts, rows, columns});
  };
  const ExpertWeights experts{view(gate, kIntermediate, kHidden), view(up, kIntermediate, kHidden),
                              view(down, kHidden, kIntermediate)};
  OneRank rank(cuda_config(moved.spec));
  const CallContext call =
      rank.layer.forward({alone.x.view({kTokens, kHidden}), ids.view({kTokens, 1}),
                          alone.weights.view({kTokens, 1}), experts},
                         {y.view({kTokens, kHidden})}, stream);
  rank.layer.backward(
      call, {alone.x.view({kTokens, kHidden}), alone.dy.view({kTokens, kHidden}), experts},
      {dx.view({kTokens, kHidden}),
       dweights.view({kTokens, 1}),
       {view(dgate, kIntermediate, kHidden), view(dup, kIntermediate, kHidden),
        view(ddown, kHidden, kIntermediate)}},
      stream);
  rank.layer.check(stream);
  EXPECT_TRUE(same_bits(y.download(), alone.y.download()));
  EXPECT_TRUE(same_bits(dx.download(), alone.dx.download()));
  const std::pair<const OnDevice<bf16>*, const OnDevice<bf16>*> gradients[] = {
      {&dgate, &alone.dgate}, {&dup, &alone.dup}, {&ddown, &alone.ddown}};
  for (const auto& [all, last] : gradients) {
    EXPECT_TRUE(same_bits(all->download(kLast, kExpertSize), last->download()));
    EXPECT_TRUE(same_bits(all->download(kLast - kExpertSize, kExpertSize),
                          std::vector<bf16>(kExpertSize)));  // an expert without rows: zeros
    EXPECT_TRUE(same_bits(all->download(kExperts * kExpertSize, kGuard),
                          std::vector<bf16>(kGuard, bf16{0xffff})));
  }
}

}  // namespace
}  // namespace megamoe::verify
