// The model's gradients, tensor by tensor, through the layer and the router.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "megamoe/communicator.h"
#include "train/model.h"
#include "train/text_data.h"
#include "train_fixture.h"

namespace megamoe::trainer {
namespace {

/// A batch of this rank, on a model whose tokens go to every expert: then the loss has no jumps
/// where a token changes its experts. The auxiliary loss is constant there, and off.
class Probe {
 public:
  Probe(const TrainOptions& options, Communicator& communicator)
      : backend_(make_backend(options.backend, communicator)),
        model_(options, *backend_),
        batch_(options.batch) {
    const Share share = items_of_rank(options.batch, communicator.rank(), communicator.size());
    contexts_.resize(share.count * options.model.context);
    targets_.resize(share.count);
    const TextData text = TextData::load(options.text_path, options.model.context);
    text.training_samples(1, share.first, contexts_, targets_);
  }

  Model& model() { return model_; }

  /// Copies of a tensor, wherever the backend has it.
  std::vector<float> download(const float* values, std::size_t count) {
    std::vector<float> copy(count);
    backend_->download(copy.data(), values, count * sizeof(float));
    return copy;
  }
  void upload(float* values, const std::vector<float>& copy) {
    backend_->upload(values, copy.data(), copy.size() * sizeof(float));
  }

  /// Mean over the batch of all ranks.
  double loss() {
    model_.parameters_changed();
    model_.forward(batch_, contexts_);
    return model_.loss(targets_);
  }

  void compute_gradients() {
    model_.parameters_changed();
    model_.forward(batch_, contexts_);
    model_.loss_for_backward(targets_);
    model_.backward();
  }

 private:
  std::unique_ptr<TrainBackend> backend_;
  Model model_;
  std::int64_t batch_;
  std::vector<std::uint8_t> contexts_;
  std::vector<std::uint8_t> targets_;
};

TrainOptions smooth_options(const TemporaryDirectory& directory) {
  TrainOptions options = tiny_options(directory);
  options.batch = 64;
  options.model.top_k = options.model.num_experts;
  options.model.aux_loss = 0;
  return options;
}

/// Moves a tensor along its gradient, both ways: the loss must change by the gradient's square
/// norm. What bf16 rounds away is what the tolerance is for: 2^-9 of each activation and weight,
/// mostly averaged out.
void expect_gradient_matches_slope(Probe& probe, ParameterGroup& group, const ParameterSlice& slice,
                                   int num_parts, Communicator& communicator) {
  probe.compute_gradients();
  const std::vector<float> kept = probe.download(group.values(slice), slice.count);
  const std::vector<float> gradient = probe.download(group.gradients(slice), slice.count);
  double square_norm = std::inner_product(gradient.begin(), gradient.end(), gradient.begin(), 0.0);
  if (num_parts > 1) {
    std::vector<double> all(communicator.size());
    communicator.all_gather(&square_norm, all.data(), sizeof square_norm, "norms", 60.0);
    square_norm = std::accumulate(all.begin(), all.end(), 0.0);
  }
  ASSERT_GT(square_norm, 0) << slice.name;
  constexpr double kLossChange = 0.01;
  const auto step = static_cast<float>(kLossChange / square_norm);
  const auto loss_at = [&](float distance) {
    std::vector<float> moved = kept;
    for (std::size_t i = 0; i < slice.count; ++i) moved[i] += distance * gradient[i];
    probe.upload(group.values(slice), moved);
    return probe.loss();
  };
  const double slope = (loss_at(step) - loss_at(-step)) / (2 * kLossChange);
  probe.upload(group.values(slice), kept);
  EXPECT_NEAR(slope, 1.0, 0.05) << slice.name << " on " << communicator.size() << " ranks";
}

class TrainModelGradients : public testing::TestWithParam<int> {};

TEST_P(TrainModelGradients, EveryTensorsGradientIsTheSlopeOfTheLoss) {
  const TemporaryDirectory directory;
  const TrainOptions options = smooth_options(directory);
  run_ranks(GetParam(), [&](Communicator& communicator) {
    Probe probe(options, communicator);
    const std::vector<ParameterSlice> shared = probe.model().shared().slices();
    for (const ParameterSlice& slice : shared) {
      expect_gradient_matches_slope(probe, probe.model().shared(), slice, 1, communicator);
    }
    const std::vector<ParameterSlice> experts = probe.model().experts().slices();
    for (const ParameterSlice& slice : experts) {
      expect_gradient_matches_slope(probe, probe.model().experts(), slice, communicator.size(),
                                    communicator);
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Ranks, TrainModelGradients, testing::Values(1, 2));

TEST(TrainModel, AuxiliaryLossReachesTheRouter) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  const auto router_gradient = [&](double aux_loss) {
    options.model.aux_loss = aux_loss;
    std::vector<float> gradient;
    run_ranks(1, [&](Communicator& communicator) {
      Probe probe(options, communicator);
      probe.compute_gradients();
      const ParameterSlice slice = probe.model().blocks()[0].parameters().router_weight;
      gradient = probe.download(probe.model().shared().gradients(slice), slice.count);
    });
    return gradient;
  };
  EXPECT_NE(router_gradient(0.0), router_gradient(0.1));
}

TEST(TrainModel, InitialParametersDoNotDependOnTheNumberOfRanks) {
  const TemporaryDirectory directory;
  const TrainOptions options = tiny_options(directory);
  const auto initial = [&](int num_ranks) {
    std::vector<std::vector<float>> gates(num_ranks);
    run_ranks(num_ranks, [&](Communicator& communicator) {
      Probe probe(options, communicator);
      const ParameterSlice slice = probe.model().blocks()[1].parameters().gate;
      gates[communicator.rank()] =
          probe.download(probe.model().experts().values(slice), slice.count);
    });
    std::vector<float> all;
    for (const auto& gate : gates) all.insert(all.end(), gate.begin(), gate.end());
    return all;
  };
  EXPECT_EQ(initial(1), initial(2));
  EXPECT_EQ(initial(1), initial(4));
}

}  // namespace
}  // namespace megamoe::trainer
