#include "train/options.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "train/text_data.h"

namespace megamoe::trainer {
namespace {

constexpr std::int64_t kMaxContext = 4096;
constexpr std::int64_t kMaxDim = 1 << 20;
constexpr std::int64_t kMaxCount = std::int64_t{1} << 40;
constexpr int kMaxRanks = 64;

void require(bool holds, const char* option, const std::string& message) {
  if (!holds) throw OptionError(option, message);
}

void require_in(std::int64_t value, std::int64_t low, std::int64_t high, const char* option) {
  require(value >= low && value <= high, option,
          "must be from " + std::to_string(low) + " to " + std::to_string(high) + ", is " +
              std::to_string(value));
}

std::string number(double value) {
  // JSON has no way to write these.
  return std::isfinite(value) ? nlohmann::json(value).dump() : std::to_string(value);
}

void require_at_least(double value, double low, const char* option) {
  require(std::isfinite(value) && value >= low, option,
          "must be a number of at least " + number(low) + ", is " + number(value));
}

void require_positive(double value, const char* option) {
  require(std::isfinite(value) && value > 0, option, "must be greater than 0, is " + number(value));
}

void require_beta(double value, const char* option) {
  require(value >= 0 && value < 1, option,
          "must be at least 0 and less than 1, is " + number(value));
}

void validate_model(const ModelOptions& model) {
  require_in(model.context, 1, kMaxContext, "--context");
  require_in(model.hidden_dim, 1, kMaxDim, "--hidden");
  require_in(model.intermediate_dim, 1, kMaxDim, "--intermediate");
  require_in(model.num_experts, 1, 1 << 16, "--experts");
  require_in(model.top_k, 1, model.num_experts, "--top-k");
  require_in(model.num_layers, 1, 1000, "--layers");
  require_at_least(model.aux_loss, 0, "--aux-loss");
  require_at_least(model.bias_rate, 0, "--bias-rate");
}

void validate_optimizer(const OptimizerOptions& optimizer) {
  require_positive(optimizer.learning_rate, "--lr");
  require_at_least(optimizer.weight_decay, 0, "--weight-decay");
  require(optimizer.learning_rate * optimizer.weight_decay < 1, "--weight-decay",
          "times --lr must be less than 1");
  require_beta(optimizer.beta1, "--beta1");
  require_beta(optimizer.beta2, "--beta2");
  require_positive(optimizer.epsilon, "--epsilon");
  require_positive(optimizer.clip_norm, "--clip-norm");
  require_in(optimizer.warmup_steps, 0, kMaxCount, "--warmup-steps");
  require_in(optimizer.decay_steps, 1, kMaxCount, "--decay-steps");
}

/// What the kernels take (docs/cuda.md), by the names that users know.
void validate_for_cuda(const ModelOptions& model) {
  constexpr std::int64_t kMultiple = 64;
  const auto require_multiple = [](std::int64_t value, const char* option) {
    require(value % kMultiple == 0, option,
            "must be a multiple of 64 with --backend cuda, is " + std::to_string(value));
  };
  require_multiple(model.hidden_dim, "--hidden");
  require_multiple(model.intermediate_dim, "--intermediate");
  require(model.num_experts <= 512, "--experts", "must be at most 512 with --backend cuda");
  require(model.top_k <= 16, "--top-k", "must be at most 16 with --backend cuda");
}

/// Whether both name one file, which need not exist yet.
bool is_same_file(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return false;
  std::error_code failed;
  if (std::filesystem::equivalent(a, b, failed)) return true;
  const auto real_a = std::filesystem::weakly_canonical(a, failed);
  const auto real_b = std::filesystem::weakly_canonical(b, failed);
  return !real_a.empty() && real_a == real_b;
}

/// What is written must not be what is read, or written for something else. --checkpoint may be
/// --resume: the file is replaced when the new one is whole.
void validate_paths(const TrainOptions& options) {
  const auto require_different = [](const std::string& path, const char* option,
                                    const std::string& other, const char* other_option) {
    require(!is_same_file(path, other), option,
            "must not be the file of " + std::string(other_option) + ", " + other);
  };
  require_different(options.log_path, "--log", options.text_path, "--text");
  require_different(options.log_path, "--log", options.resume_path, "--resume");
  require_different(options.checkpoint_path, "--checkpoint", options.text_path, "--text");
  require_different(options.checkpoint_path, "--checkpoint", options.log_path, "--log");
}

}  // namespace

void validate(const TrainOptions& options) {
  require(!options.text_path.empty(), "--text", "must name a file");
  require_in(options.num_steps, 1, kMaxCount, "--steps");
  require_in(options.num_ranks, 1, kMaxRanks, "--ranks");
  require_in(options.batch, 1, 1 << 24, "--batch");
  require_in(options.num_threads, 0, 1024, "--threads");
  require_in(options.checkpoint_every, 0, kMaxCount, "--checkpoint-every");
  require(options.checkpoint_every == 0 || !options.checkpoint_path.empty(), "--checkpoint-every",
          "needs --checkpoint FILE");
  validate_paths(options);
  require_in(options.sample_bytes, 0, 1 << 20, "--sample-bytes");
  require_at_least(options.temperature, 0, "--temperature");
  validate_model(options.model);
  if (options.backend == Backend::cuda) validate_for_cuda(options.model);
  validate_optimizer(options.optimizer);
  require(options.model.num_experts % options.num_ranks == 0, "--experts",
          "must be divisible by --ranks: " + std::to_string(options.model.num_experts) +
              " experts do not divide among " + std::to_string(options.num_ranks) + " ranks");
}

std::string describe_run(const TrainOptions& options, const TextData& text) {
  const ModelOptions& model = options.model;
  const OptimizerOptions& optimizer = options.optimizer;
  const nlohmann::ordered_json description = {
      {"context", model.context},
      {"hidden", model.hidden_dim},
      {"intermediate", model.intermediate_dim},
      {"experts", model.num_experts},
      {"top-k", model.top_k},
      {"layers", model.num_layers},
      {"batch", options.batch},
      {"seed", options.seed},
      {"aux-loss", model.aux_loss},
      {"bias-rate", model.bias_rate},
      {"lr", optimizer.learning_rate},
      {"weight-decay", optimizer.weight_decay},
      {"beta1", optimizer.beta1},
      {"beta2", optimizer.beta2},
      {"epsilon", optimizer.epsilon},
      {"clip-norm", optimizer.clip_norm},
      {"warmup-steps", optimizer.warmup_steps},
      {"decay-steps", optimizer.decay_steps},
      {"text", std::to_string(text.num_train_bytes() + text.num_held_out_bytes()) +
                   " bytes with checksum " + std::to_string(text.checksum())},
  };
  return description.dump();
}

}  // namespace megamoe::trainer
