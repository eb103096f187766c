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

/// qwen1.5-moe with its 60 experts: ten copies of the six above, which the oracle has judged. With
/// the other copies' slots empty a copy's six experts must leave the bits that they leave among
/// all.
class Qwen15MoeOfAllExperts {
 public:
  static constexpr int kCopies = 10;

  Qwen15MoeOfAllExperts() {
    ProblemSpec spec = spec_with_tokens({5, 3});
    spec.hidden_dim = 2048;
    spec.intermediate_dim = 1408;
    spec.num_experts = 6;
    spec.top_k = 4;
    six_ = make_problem(spec);
  }

  [[nodiscard]] const Problem& six() const { return six_; }
  [[nodiscard]] Problem all() const {
    Problem problem = six_;
    problem.spec.num_experts *= kCopies;
    for (auto Problem::*weights : {&Problem::gate_EIH, &Problem::up_EIH, &Problem::down_EHI}) {
      std::vector<bf16>& copies = problem.*weights;
      copies.reserve((six_.*weights).size() * kCopies);
      for (int copy = 1; copy < kCopies; ++copy) {
        copies.insert(copies.end(), (six_.*weights).begin(), (six_.*weights).end());
      }
    }
    for (std::size_t slot = 0; slot < problem.expert_ids_TK.size(); ++slot) {
      problem.expert_ids_TK[slot] += six_.spec.num_experts * copy_of(slot);
    }
    return problem;
  }
  [[nodiscard]] Problem of_copy(int copy) const {
    Problem problem = six_;
    for (std::size_t slot = 0; slot < problem.expert_ids_TK.size(); ++slot) {
      if (copy_of(slot) != copy) problem.expert_ids_TK[slot] = -1;
    }
    return problem;
  }

 private:
  static int copy_of(std::size_t slot) { return static_cast<int>(slot * 7 % kCopies); }

  Problem six_;
};

/// The bytes of one of the equal parts into which the tensor's experts fall.
std::vector<std::byte> part_of(const RawTensor& tensor, int part, int num_parts) {
  const auto bytes = static_cast<std::ptrdiff_t>(tensor.bytes.size() / num_parts);
  return {tensor.bytes.begin() + part * bytes, tensor.bytes.begin() + (part + 1) * bytes};
}

TEST(CudaModelsOfAllExperts, Qwen15MoeHasTheBitsOfSixExpertsAtATime) {
  const Qwen15MoeOfAllExperts model;
  const Problem problem = model.all();
  ASSERT_EQ(problem.spec.num_experts, 60);
  const LayerTensors all = run_layer(problem, {});
  const LayerTensors six = run_layer(model.six(), {});
  EXPECT_TRUE(all.y == six.y);
  EXPECT_TRUE(all.dx == six.dx);
  EXPECT_TRUE(all.dweights == six.dweights);
  for (int copy = 0; copy < model.kCopies; ++copy) {
    const LayerTensors alone = run_layer(model.of_copy(copy), {});
    for (auto LayerTensors::*gradient :
         {&LayerTensors::dgate, &LayerTensors::dup, &LayerTensors::ddown}) {
      EXPECT_TRUE(part_of(all.*gradient, copy, model.kCopies) == (alone.*gradient).bytes)
          << "experts " << copy * 6 << " to " << copy * 6 + 5;
    }
  }
  Problem on_one_rank = problem;
  on_one_rank.spec.tokens_per_rank = {8};
  RunOptions options;
  options.overlap = Overlap::off;
  EXPECT_EQ(differing_tensors(run_layer(on_one_rank, options), all), "");
}

}  // namespace
}  // namespace megamoe::verify
