// The trainer's dense operations in fp64 against central finite differences, and against products
// written out.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "train/counter_rng.h"
#include "train/dense_ops.h"

namespace megamoe::trainer {
namespace {

std::vector<double> random_values(std::size_t count, std::uint64_t seed) {
  const CounterRng rng(seed, RandomStream::parameters);
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = rng.normal(i);
  return values;
}

/// The gradient of `loss` by every element of `values`, by central differences.
std::vector<double> numeric_gradient(std::vector<double>& values,
                                     const std::function<double()>& loss) {
  constexpr double kStep = 1e-5;
  std::vector<double> gradient;
  for (double& value : values) {
    const double kept = value;
    value = kept + kStep;
    const double above = loss();
    value = kept - kStep;
    const double below = loss();
    value = kept;
    gradient.push_back((above - below) / (2 * kStep));
  }
  return gradient;
}

/// The error of central differences is of the order kStep^2 = 1e-10, of their rounding 1e-11.
void expect_close(const std::vector<double>& analytic, const std::vector<double>& numeric) {
  ASSERT_EQ(analytic.size(), numeric.size());
  for (std::size_t i = 0; i < numeric.size(); ++i) {
    EXPECT_NEAR(analytic[i], numeric[i], 1e-7 * (1 + std::abs(numeric[i]))) << "element " << i;
  }
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

TEST(TrainDense, ProductsOfEverySizeAreThoseWrittenOut) {
  for (const std::int64_t m : {0, 1, 3, 4, 5, 9}) {
    for (const std::int64_t n : {1, 7, 8, 9, 17}) {
      for (const std::int64_t k : {0, 1, 5, 128, 300}) {
        const std::vector<double> a = random_values(m * k, 1);
        const std::vector<double> b = random_values(k * n, 2);
        std::vector<double> c = random_values(m * n, 3);
        std::vector<double> expected = c;
        for (std::int64_t row = 0; row < m; ++row) {
          for (std::int64_t column = 0; column < n; ++column) {
            double sum = 0;
            for (std::int64_t i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + column];
            expected[row * n + column] += sum;
          }
        }
        add_product(a.data(), b.data(), c.data(), m, n, k);
        for (std::int64_t i = 0; i < m * n; ++i) {
          EXPECT_NEAR(c[i], expected[i], 1e-11) << m << " x " << n << " x " << k << " at " << i;
        }
      }
    }
  }
}

TEST(TrainDense, TransposeMovesEveryElement) {
  const std::vector<double> in = {1, 2, 3, 4, 5, 6};
  std::vector<double> out(6);
  transpose(in.data(), out.data(), 2, 3);
  EXPECT_EQ(out, (std::vector<double>{1, 4, 2, 5, 3, 6}));
}

TEST(TrainDense, EmbeddingGradients) {
  const EmbeddingShape shape = {.num_tokens = 4, .context = 3, .hidden_dim = 5};
  // A byte twice in one context, one in several contexts, and the largest value.
  const std::vector<std::uint8_t> contexts = {7, 7, 255, 0, 7, 1, 255, 2, 0, 3, 3, 3};
  std::vector<double> embedding = random_values(kVocabulary * shape.hidden_dim, 1);
  std::vector<double> position = random_values(shape.context * shape.hidden_dim, 2);
  const std::vector<double> dx = random_values(shape.num_tokens * shape.hidden_dim, 3);
  std::vector<double> x(dx.size());
  const auto loss = [&] {
    embed(shape, contexts.data(), embedding.data(), position.data(), x.data());
    return dot(x, dx);
  };
  std::vector<double> d_embedding(embedding.size());
  std::vector<double> d_position(position.size());
  add_embed_gradients(shape, contexts.data(), embedding.data(), position.data(), dx.data(),
                      d_embedding.data(), d_position.data());
  expect_close(d_embedding, numeric_gradient(embedding, loss));
  expect_close(d_position, numeric_gradient(position, loss));
}

TEST(TrainDense, RmsNormGradientsAreAdded) {
  constexpr std::int64_t kTokens = 3;
  constexpr std::int64_t kHidden = 6;
  std::vector<double> x = random_values(kTokens * kHidden, 1);
  std::vector<double> weight = random_values(kHidden, 2);
  const std::vector<double> dy = random_values(kTokens * kHidden, 3);
  std::vector<double> y(x.size());
  std::vector<double> inverse_rms(kTokens);
  const auto loss = [&] {
    rms_norm(kTokens, kHidden, x.data(), weight.data(), y.data(), inverse_rms.data());
    return dot(y, dy);
  };
  loss();
  std::vector<double> dx(x.size(), 2.0);
  std::vector<double> d_weight(weight.size(), -1.0);
  add_rms_norm_gradients(kTokens, kHidden, x.data(), weight.data(), inverse_rms.data(), dy.data(),
                         dx.data(), d_weight.data());
  for (double& value : dx) value -= 2.0;
  for (double& value : d_weight) value += 1.0;
  expect_close(dx, numeric_gradient(x, loss));
  expect_close(d_weight, numeric_gradient(weight, loss));
}

TEST(TrainDense, RmsNormOfZerosIsFinite) {
  const std::vector<float> x(4, 0.0F);
  const std::vector<float> weight(4, 1.0F);
  std::vector<float> y(4, 1.0F);
  float inverse_rms = 0;
  rms_norm<float>(1, 4, x.data(), weight.data(), y.data(), &inverse_rms);
  EXPECT_EQ(y, x);
  EXPECT_TRUE(std::isfinite(inverse_rms));
}

// The head is logits = normed embedding^T: the products of Model::forward and Model::backward.
TEST(TrainDense, OutputHeadAndCrossEntropyGradients) {
  constexpr std::int64_t kTokens = 3;
  constexpr std::int64_t kHidden = 4;
  constexpr double kScale = 0.25;
  const std::vector<std::uint8_t> targets = {0, 255, 17};
  std::vector<double> normed = random_values(kTokens * kHidden, 1);
  std::vector<double> embedding = random_values(kVocabulary * kHidden, 2);
  std::vector<double> embedding_HV(embedding.size());
  std::vector<double> logits(kTokens * kVocabulary);
  const auto compute_logits = [&] {
    transpose(embedding.data(), embedding_HV.data(), kVocabulary, kHidden);
    logits.assign(logits.size(), 0.0);
    add_product(normed.data(), embedding_HV.data(), logits.data(), kTokens, kVocabulary, kHidden);
  };
  const auto loss = [&] {
    compute_logits();
    return kScale * cross_entropy(kTokens, targets.data(), logits.data());
  };
  const double expected_loss = loss() / kScale;
  EXPECT_EQ(cross_entropy_gradient(kTokens, targets.data(), kScale, logits.data()), expected_loss);

  std::vector<double> d_normed(normed.size());
  add_product(logits.data(), embedding.data(), d_normed.data(), kTokens, kHidden, kVocabulary);
  std::vector<double> d_logits_VT(logits.size());
  transpose(logits.data(), d_logits_VT.data(), kTokens, kVocabulary);
  std::vector<double> d_embedding(embedding.size());
  add_product(d_logits_VT.data(), normed.data(), d_embedding.data(), kVocabulary, kHidden, kTokens);
  expect_close(d_normed, numeric_gradient(normed, loss));
  expect_close(d_embedding, numeric_gradient(embedding, loss));
}

TEST(TrainDense, CrossEntropyOfKnownLogits) {
  std::vector<double> logits(kVocabulary, 0.0);
  const std::uint8_t target = 9;
  EXPECT_NEAR(cross_entropy(1, &target, logits.data()), std::log(256.0), 1e-12);
  // Logits whose exponentials overflow on their own.
  logits[9] = 1000.0;
  EXPECT_NEAR(cross_entropy(1, &target, logits.data()), 0.0, 1e-12);
  logits[10] = 1000.0;
  EXPECT_NEAR(cross_entropy(1, &target, logits.data()), std::log(2.0), 1e-12);
}

}  // namespace
}  // namespace megamoe::trainer
