// Layers with the widths of published models: right by the oracle, and the same bits whatever the
// path, the memory mode and the number of ranks. Few experts and tokens, because the oracle is
// slow.
#include <gtest/gtest.h>

#include "layer_fixture.h"

namespace megamoe::verify {
namespace {

struct Model {
  const char* name;
  std::int64_t hidden_dim;
  std::int64_t intermediate_dim;
  std::int32_t num_experts;
  std::int32_t top_k;
};
void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }

class CudaModels : public testing::TestWithParam<Model> {
 protected:
  static Problem problem_of_two_ranks() {
    ProblemSpec spec = spec_with_tokens({5, 3});
    spec.hidden_dim = GetParam().hidden_dim;
    spec.intermediate_dim = GetParam().intermediate_dim;
    spec.num_experts = GetParam().num_experts;
    spec.top_k = GetParam().top_k;
    return make_problem(spec);
  }
};

TEST_P(CudaModels, AreRightAndHaveTheSameBitsOnEveryPath) {
  const Problem problem = problem_of_two_ranks();
  const LayerTensors overlapped = run_layer(problem, {});
  expect_right(problem, overlapped, {});
  RunOptions options;
  options.overlap = Overlap::off;
  EXPECT_EQ(differing_tensors(run_layer(problem, options), overlapped), "");
  options.overlap = Overlap::on;
  options.memory_mode = MemoryMode::recompute;
  EXPECT_EQ(differing_tensors(run_layer(problem, options), overlapped), "");
  Problem on_one_rank = problem;
  on_one_rank.spec.tokens_per_rank = {8};
  EXPECT_EQ(differing_tensors(run_layer(on_one_rank, {}), overlapped), "");
}

INSTANTIATE_TEST_SUITE_P(
    Published, CudaModels,
    testing::Values(Model{"mixtral_8x7b", 4096, 14336, 2, 2}, Model{"qwen2_57b", 3584, 2560, 4, 4},
                    Model{"qwen1_5_moe", 2048, 1408, 6, 4}, Model{"qwen3_30b", 2048, 768, 16, 8},
                    Model{"qwen3_235b", 4096, 1536, 4, 4}, Model{"deepseek_v3", 7168, 2048, 4, 4}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace megamoe::verify
