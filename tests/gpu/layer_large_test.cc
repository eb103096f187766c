// Sizes that need the memory of a device. Legend: T tokens, E experts.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "gpu/huge_experts.h"
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
  const DeviceProblem of_small(small), of_large(large);
  step_on_one_rank(small.spec, of_small);
  step_on_one_rank(large.spec, of_large);
  const std::vector<bf16> y = of_small.y.download(), dx = of_small.dx.download();
  for (const std::int64_t first : {std::int64_t{0}, std::int64_t{19968}, kTokens - kSmall}) {
    EXPECT_TRUE(same_bits(of_large.y.download(first * kHidden, kSmall * kHidden), y)) << first;
    EXPECT_TRUE(same_bits(of_large.dx.download(first * kHidden, kSmall * kHidden), dx)) << first;
  }
}

/// Results of the last expert must have the bits of a layer of that one expert.
TEST(CudaCase12HugeExpertWeights, TheLastExpertLiesBeyondTwoToThe31Elements) {
  constexpr std::int64_t kExperts = 512, kTokens = 40;
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (free < std::size_t{80} << 30) GTEST_SKIP() << "needs 80 GB of device memory";
  ProblemSpec spec = spec_of_one_huge_expert(kTokens);
  const std::int64_t hidden = spec.hidden_dim;
  const DeviceProblem only(make_problem(spec));
  step_on_one_rank(spec, only);

  const HugeExperts experts(kExperts, only);
  const OnDevice<std::int32_t> ids(std::vector<std::int32_t>(kTokens, kExperts - 1));
  const OnDevice<bf16> y(kTokens * hidden), dx(kTokens * hidden);
  const OnDevice<float> dweights(kTokens);
  spec.num_experts = kExperts;
  OneRank rank(cuda_config(spec));
  const TestStream stream;
  ForwardInput input = only.forward_input();
  input.expert_ids = ids.view({kTokens, 1});
  input.experts = experts.weights();
  BackwardInput backward_input = only.backward_input();
  backward_input.experts = input.experts;
  const CallContext call = rank.layer.forward(input, {y.view({kTokens, hidden})}, stream);
  rank.layer.backward(
      call, backward_input,
      {dx.view({kTokens, hidden}), dweights.view({kTokens, 1}), experts.gradients()}, stream);
  rank.layer.check(stream);
  EXPECT_TRUE(same_bits(y.download(), only.y.download()));
  EXPECT_TRUE(same_bits(dx.download(), only.dx.download()));
  EXPECT_EQ(dweights.download(), only.dweights.download());
  experts.expect_gradients_of_the_last();
}

}  // namespace
}  // namespace megamoe::verify
