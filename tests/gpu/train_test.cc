// The trainer on GPUs beside the trainer on the CPU: operations, losses, checkpoints. What a run
// promises by itself (it learns, equal bits for any number of ranks, with and without overlap,
// after a break) is in ../train_loop_test.cc, and the slopes of its loss in ../train_model_test.cc:
// this program runs both on its GPUs.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "gpu/spawn_test.h"
#include "train_fixture.h"

namespace megamoe::trainer {
namespace {

/// Copies one checkpoint to another, with every weight off by about one part in 2^23.
void perturb_checkpoint(const TrainOptions& options, const std::string& from, const std::string& to,
                        unsigned seed) {
  const TextData text = TextData::load(options.text_path, options.model.context);
  Checkpoint checkpoint = read_checkpoint(from, describe_run(options, text));
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> noise(0.0F, 0x1p-23F);
  for (std::vector<float>* values : {&checkpoint.shared.values, &checkpoint.experts.values}) {
    for (float& value : *values) value *= 1.0F + noise(engine);
  }
  write_checkpoint(to, checkpoint);
}

std::vector<double> losses_of(const TrainOptions& options) {
  std::vector<double> losses;
  for (const StepRecord& step : train_and_report(options).steps) losses.push_back(step.loss);
  return losses;
}

/// The largest difference of two curves up to each step.
std::vector<double> differences(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> largest;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double before = i == 0 ? 0.0 : largest.back();
    largest.push_back(std::max(before, std::abs(a[i] - b[i])));
  }
  return largest;
}

// Training amplifies rounding: how much, the CPU's trainer tells when its weights are moved by one
// rounding. Twice the largest of three such curves is allowed, and 1e-3 while they are together:
// there a token whose two best experts are equal but for rounding has gone to the other one.
TEST(TrainCuda, LossesAreThoseOfTheCpuAsFarAsRoundingAllows) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.backend = Backend::cpu;
  options.num_steps = 1;
  options.checkpoint_path = directory.file("first.ckpt");
  train(options, {});
  TrainOptions resumed = options;
  resumed.num_steps = 40;
  resumed.checkpoint_path.clear();
  resumed.resume_path = options.checkpoint_path;
  const std::vector<double> on_cpu = losses_of(resumed);
  std::vector<double> allowed(on_cpu.size(), 0.5e-3);
  for (const unsigned seed : {1U, 2U, 3U}) {
    TrainOptions perturbed = resumed;
    perturbed.resume_path = directory.file("perturbed.ckpt");
    perturb_checkpoint(options, options.checkpoint_path, perturbed.resume_path, seed);
    const std::vector<double> change = differences(on_cpu, losses_of(perturbed));
    for (std::size_t i = 0; i < allowed.size(); ++i) allowed[i] = std::max(allowed[i], change[i]);
  }
  resumed.backend = Backend::cuda;
  for (const int num_ranks : {1, 2}) {
    resumed.num_ranks = num_ranks;
    const std::vector<double> difference = differences(on_cpu, losses_of(resumed));
    ASSERT_EQ(difference.size(), allowed.size());
    for (std::size_t i = 0; i < allowed.size(); ++i) {
      EXPECT_LE(difference[i], 2 * allowed[i]) << "step " << i + 2 << ", " << num_ranks << " ranks";
    }
    std::printf(
        "largest difference to the CPU on %d ranks: %.1e at step 10, %.1e at 40; a "
        "rounding of the weights: %.1e, %.1e\n",
        num_ranks, difference[8], difference.back(), allowed[8], allowed.back());
  }
}

TEST(TrainCuda, CheckpointsOfEitherBackendAreTheOthers) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.num_steps = 3;
  const std::string saved_again = directory.file("again.ckpt");
  for (const Backend backend : {Backend::cpu, Backend::cuda}) {
    options.backend = backend;
    options.resume_path.clear();
    options.checkpoint_path = directory.file(backend == Backend::cpu ? "cpu.ckpt" : "cuda.ckpt");
    const Report first = train_and_report(options);
    TrainOptions other = options;
    other.backend = backend == Backend::cpu ? Backend::cuda : Backend::cpu;
    save_again(other, options.checkpoint_path, saved_again, 2);
    EXPECT_EQ(read_whole_file(saved_again), read_whole_file(options.checkpoint_path));
    other.resume_path = options.checkpoint_path;
    other.checkpoint_path.clear();
    other.num_steps = 6;
    const Report rest = train_and_report(other);
    ASSERT_EQ(rest.steps.size(), 3U);
    EXPECT_LT(rest.steps.back().loss, first.steps.front().loss);
    TrainOptions unbroken = options;
    unbroken.resume_path = options.checkpoint_path;
    unbroken.checkpoint_path.clear();
    unbroken.num_steps = 4;
    // One step from equal states: the rounding of one forward pass, and a token or two of 32 that
    // go to another expert.
    EXPECT_NEAR(rest.steps.front().loss, train_and_report(unbroken).steps.front().loss, 1e-3);
  }
}

TEST(TrainCuda, ThirtyStepsLearnMoreThanByteFrequencies) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.num_steps = 30;
  options.num_ranks = 2;
  const Report report = train_and_report(options);
  EXPECT_LT(report.final_record.held_out_loss, report.final_record.unigram_loss);
}

TEST(TrainCuda, RefusalsNameTheirReason) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.model.hidden_dim = 96;
  try {
    train(options, {});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const OptionError& error) {
    EXPECT_EQ(error.option(), "--hidden");
  }
}

/// What a process of its own does in the test below; not a test of its own.
TEST(TrainCudaFresh, DISABLED_Run) {
  alarm(60);
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.num_steps = 3;
  options.num_ranks = 4;
  EXPECT_EQ(train_and_report(options).steps.size(), 3U);
}

// In a process that has launched none of their kernels: a rank that loads one while a peer's call
// waits for it would wait for that call in turn.
TEST(TrainCudaFresh, RanksThatShareAGpuTakeTheirFirstSteps) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  std::string variable = "CUDA_VISIBLE_DEVICES=" + std::string(visible == nullptr ? "0" : visible);
  variable.resize(std::min(variable.size(), variable.find(',')));
  std::vector<char*> environment = {const_cast<char*>(variable.c_str())};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::string(*entry).rfind("CUDA_VISIBLE_DEVICES=", 0) != 0) environment.push_back(*entry);
  }
  environment.push_back(nullptr);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const pid_t process = spawn_test("TrainCudaFresh.DISABLED_Run", environment.data());
    ASSERT_NE(process, 0);
    int status = -1;
    waitpid(process, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

// ---- Operations against the same in fp64 -----------------------------------------------------

/// A device tensor with its values on the host.
template <class T>
struct Tensor {
  Tensor(TrainBackend& where, std::vector<T> values)
      : backend(where),
        host(std::move(values)),
        buffer(where, static_cast<std::int64_t>(host.size())) {
    backend.upload(buffer.data(), host.data(), host.size() * sizeof(T));
  }
  [[nodiscard]] T* data() { return buffer.data(); }
  [[nodiscard]] std::vector<double> download() {
    backend.download(host.data(), buffer.data(), host.size() * sizeof(T));
    return {host.begin(), host.end()};
  }
  [[nodiscard]] std::vector<double> wide() const { return {host.begin(), host.end()}; }

  TrainBackend& backend;
  std::vector<T> host;
  Buffer<T> buffer;
};

class TrainCudaOperations : public testing::Test {
 protected:
  void SetUp() override {
    ranks_ = make_thread_communicators(1);
    backend_ = make_backend(Backend::cuda, *ranks_[0]);
  }

  Tensor<float> normal(std::int64_t count) {
    std::normal_distribution<float> distribution;
    std::vector<float> values(count);
    for (float& value : values) value = distribution(engine_);
    return {*backend_, values};
  }
  Tensor<std::uint8_t> bytes(std::int64_t count) {
    std::vector<std::uint8_t> values(count);
    // Few values, so that they meet; and the last of all.
    for (std::uint8_t& value : values) value = static_cast<std::uint8_t>(engine_() % 7);
    values.back() = 255;
    return {*backend_, values};
  }
  Operations& operations() { return backend_->operations(); }

  std::mt19937_64 engine_{1};
  std::vector<std::unique_ptr<Communicator>> ranks_;
  std::unique_ptr<TrainBackend> backend_;
};

/// Sums of `length` fp32 terms whose size is about `scale`: at most an ulp of the sum so far is
/// lost with each.
void expect_close(const std::vector<double>& actual, const std::vector<double>& expected,
                  std::int64_t length, const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  double largest = 0.0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  const double allowed = 4.0 * static_cast<double>(length) * 0x1p-24 * std::max(1.0, largest);
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], allowed) << what << ", element " << i;
  }
}

constexpr std::int64_t kTokens = 37;
constexpr std::int64_t kHidden = 320;  // more than a block's threads
const std::vector<Share> kShards = {{0, 5}, {5, 0}, {5, 32}};

TEST_F(TrainCudaOperations, Products) {
  const ProductSize size = {24, kHidden};
  Tensor<float> a = normal(kTokens * kHidden);
  Tensor<float> b = normal(24 * kHidden);
  Tensor<float> c = normal(kTokens * 24);
  std::vector<double> b_KN(24 * kHidden);
  transpose(b.wide().data(), b_KN.data(), 24, kHidden);
  std::vector<double> expected(kTokens * 24);
  add_product(a.wide().data(), b_KN.data(), expected.data(), kTokens, 24, kHidden);
  operations().multiply_by_transposed(kShards, size, a.data(), b.data(), c.data());
  expect_close(c.download(), expected, kHidden, "a b^T");

  Tensor<float> d = normal(kTokens * kHidden);
  std::vector<double> expected_d = d.wide();
  add_product(c.wide().data(), b.wide().data(), expected_d.data(), kTokens, kHidden, 24);
  operations().add_product(kShards, {kHidden, 24}, c.data(), b.data(), d.data());
  expect_close(d.download(), expected_d, kHidden, "d += c b");

  Tensor<float> e = normal(24 * kHidden);
  std::vector<double> expected_e = e.wide();
  std::vector<double> c_NT(c.host.size());
  transpose(c.wide().data(), c_NT.data(), kTokens, 24);
  add_product(c_NT.data(), a.wide().data(), expected_e.data(), 24, kHidden, kTokens);
  operations().add_product_over_tokens(kTokens, 24, kHidden, c.data(), a.data(), e.data());
  operations().add_product_over_tokens(0, 24, kHidden, c.data(), a.data(), e.data());
  expect_close(e.download(), expected_e, kTokens, "e += c^T a");
}

TEST_F(TrainCudaOperations, Embedding) {
  const EmbeddingShape shape = {kTokens, 5, kHidden};
  Tensor<std::uint8_t> contexts = bytes(kTokens * 5);
  Tensor<float> embedding = normal(kVocabulary * kHidden);
  Tensor<float> position = normal(5 * kHidden);
  Tensor<float> x = normal(kTokens * kHidden);
  Tensor<float> d_embedding = normal(kVocabulary * kHidden);
  Tensor<float> d_position = normal(5 * kHidden);
  std::vector<double> expected_d_embedding = d_embedding.wide();
  std::vector<double> expected_d_position = d_position.wide();
  add_embed_gradients(shape, contexts.host.data(), embedding.wide().data(), position.wide().data(),
                      x.wide().data(), expected_d_embedding.data(), expected_d_position.data());
  operations().add_embed_gradients(shape, contexts.data(), embedding.data(), position.data(),
                                   x.data(), d_embedding.data(), d_position.data());
  expect_close(d_embedding.download(), expected_d_embedding, kTokens, "d_embedding");
  expect_close(d_position.download(), expected_d_position, kTokens, "d_position");
  std::vector<double> expected(kTokens * kHidden);
  embed(shape, contexts.host.data(), embedding.wide().data(), position.wide().data(),
        expected.data());
  operations().embed(shape, contexts.data(), embedding.data(), position.data(), x.data());
  expect_close(x.download(), expected, 8, "x");
}

TEST_F(TrainCudaOperations, RmsNorm) {
  Tensor<float> x = normal(kTokens * kHidden);
  Tensor<float> weight = normal(kHidden);
  Tensor<float> y = normal(kTokens * kHidden);
  Tensor<float> inverse_rms = normal(kTokens);
  std::vector<double> expected_y(kTokens * kHidden);
  std::vector<double> expected_rms(kTokens);
  rms_norm(kTokens, kHidden, x.wide().data(), weight.wide().data(), expected_y.data(),
           expected_rms.data());
  operations().rms_norm(kTokens, kHidden, x.data(), weight.data(), y.data(), inverse_rms.data());
  expect_close(y.download(), expected_y, 2, "y");
  expect_close(inverse_rms.download(), expected_rms, 2, "1 / rms");

  Tensor<float> dy = normal(kTokens * kHidden);
  Tensor<float> dx = normal(kTokens * kHidden);
  Tensor<float> d_weight = normal(kHidden);
  std::vector<double> expected_dx = dx.wide();
  std::vector<double> expected_d_weight = d_weight.wide();
  add_rms_norm_gradients(kTokens, kHidden, x.wide().data(), weight.wide().data(),
                         expected_rms.data(), dy.wide().data(), expected_dx.data(),
                         expected_d_weight.data());
  operations().add_rms_norm_gradients(kTokens, kHidden, x.data(), weight.data(), inverse_rms.data(),
                                      dy.data(), dx.data(), d_weight.data());
  expect_close(dx.download(), expected_dx, 4, "dx");
  expect_close(d_weight.download(), expected_d_weight, kTokens, "d_weight");
}

TEST_F(TrainCudaOperations, CrossEntropy) {
  Tensor<float> logits = normal(kTokens * kVocabulary);
  Tensor<std::uint8_t> targets = bytes(kTokens);
  Buffer<double> losses(*backend_, 3);
  const auto expect_losses = [&](const std::vector<double>& logits_TV, const char* what) {
    std::vector<double> actual(3);
    backend_->download(actual.data(), losses.data(), 3 * sizeof(double));
    std::vector<double> expected;
    for (const Share& shard : kShards) {
      expected.push_back(cross_entropy(shard.count, targets.host.data() + shard.first,
                                       logits_TV.data() + shard.first * kVocabulary));
    }
    expect_close(actual, expected, 4, what);
  };
  const std::vector<double> before = logits.wide();
  operations().cross_entropy(kShards, targets.data(), logits.data(), losses.data());
  expect_losses(before, "losses");
  operations().zero(losses.data(), 3 * sizeof(double));
  std::vector<double> gradient = before;
  cross_entropy_gradient(kTokens, targets.host.data(), 0.25, gradient.data());
  operations().cross_entropy_gradient(kShards, targets.data(), 0.25F, logits.data(), losses.data());
  expect_losses(before, "losses before the gradient");
  expect_close(logits.download(), gradient, 4, "the gradient");
}

TEST_F(TrainCudaOperations, SumsRoundingsAndAdamW) {
  Tensor<float> a = normal(1000);
  Tensor<float> b = normal(1000);
  Tensor<float> total = normal(1000);
  const std::vector<const float*> parts = {a.data(), b.data(), a.data()};
  operations().sum_in_order(parts, 1000, total.data());
  const std::vector<double> sums = total.download();
  for (std::size_t i = 0; i < sums.size(); ++i) {
    ASSERT_EQ(sums[i], a.host[i] + b.host[i] + a.host[i]);
  }
  std::vector<double> squares(6);
  const std::vector<EqualParts> arrays = {{a.data(), 1000, 1}, {b.data(), 200, 5}};
  operations().square_sums(arrays, squares);
  std::vector<double> expected(6, 0.0);
  for (std::size_t i = 0; i < 1000; ++i) {
    expected[0] += static_cast<double>(a.host[i]) * a.host[i];
    expected[1 + i / 200] += static_cast<double>(b.host[i]) * b.host[i];
  }
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(squares[i], expected[i], 1e-10);

  Buffer<bf16> rounded(*backend_, 1000);
  operations().round_to_bf16(1000, a.data(), rounded.data());
  operations().add_widened(1000, rounded.data(), b.data());
  operations().widen(1000, rounded.data(), total.data());
  const std::vector<float> b_before = b.host;
  const std::vector<double> added = b.download();
  const std::vector<double> widened = total.download();
  for (std::size_t i = 0; i < 1000; ++i) {
    const float bf16_value = to_float(to_bf16(a.host[i]));
    ASSERT_EQ(widened[i], bf16_value);
    ASSERT_EQ(added[i], b_before[i] + bf16_value);
  }

  Tensor<float> values = normal(1000);
  Tensor<float> first = normal(1000);
  Tensor<float> second(*backend_, std::vector<float>(1000, 0.5F));
  const AdamWFactors factors = {0.9F, 0.99F, 0.5F, 0.01F, 1.5F, 1e-8F};
  std::vector<double> expected_values;
  for (std::size_t i = 0; i < 1000; ++i) {
    const double gradient = 0.5 * a.host[i];
    const double m = 0.9F * static_cast<double>(first.host[i]) + (1.0 - 0.9F) * gradient;
    const double v = 0.99F * 0.5 + (1.0 - 0.99F) * gradient * gradient;
    expected_values.push_back(0.75 * values.host[i] - 0.01 * m / (std::sqrt(1.5 * v) + 1e-8));
  }
  operations().adamw(factors, 0.75F, {1000, a.data(), values.data(), first.data(), second.data()});
  expect_close(values.download(), expected_values, 4, "AdamW");
}

}  // namespace
}  // namespace megamoe::trainer
