// Everything that `megamoe train` can be told. The defaults are those of the command.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "megamoe/config.h"

namespace megamoe::trainer {

class TextData;

/// An option whose value is out of range, or does not fit another one.
class OptionError : public std::runtime_error {
 public:
  OptionError(std::string option, const std::string& message)
      : std::runtime_error(message), option_(std::move(option)) {}
  /// As it is spelt on the command line, e.g. "--experts".
  [[nodiscard]] const std::string& option() const { return option_; }

 private:
  std::string option_;
};

/// Shape of the model; every rank has the same.
struct ModelOptions {
  std::int64_t context = 8;             ///< bytes that the next byte is predicted from
  std::int64_t hidden_dim = 128;        ///< H
  std::int64_t intermediate_dim = 128;  ///< I of one expert
  std::int32_t num_experts = 8;         ///< E in each block
  std::int32_t top_k = 2;               ///< K
  std::int64_t num_layers = 2;          ///< L
  double aux_loss = 0.01;               ///< coefficient of each block's balancing loss
  double bias_rate = 0.001;             ///< step of the routers' selection bias towards balance
};

/// AdamW with linear warmup and cosine decay.
struct OptimizerOptions {
  double learning_rate = 3e-3;  ///< the highest, reached after warmup
  double weight_decay = 3.0;    ///< times the learning rate; not of the weights of norms
  double beta1 = 0.9;
  double beta2 = 0.98;
  double epsilon = 1e-8;
  double clip_norm = 1.0;  ///< of the gradient of all parameters of all ranks
  std::int64_t warmup_steps = 20;
  /// Steps until the cosine has fallen to a tenth; not --steps, so that a run can be made longer.
  std::int64_t decay_steps = 600;
};

struct TrainOptions {
  std::string text_path;
  std::int64_t num_steps = 20;  ///< counted from step 0, also for a resumed run
  int num_ranks = 1;
  std::int64_t batch = 256;  ///< samples a step, over all ranks
  std::uint64_t seed = 1;
  ModelOptions model;
  OptimizerOptions optimizer;

  MemoryMode memory_mode = MemoryMode::saved;
  Overlap overlap = Overlap::on;
  Backend backend = Backend::cpu;
  int num_threads = 0;  ///< of each rank; 0 divides the machine's cores among the ranks

  std::string log_path;               ///< empty: no log
  std::string checkpoint_path;        ///< empty: no checkpoint
  std::int64_t checkpoint_every = 0;  ///< steps; 0: only after the last step
  std::string resume_path;            ///< empty: start at step 0

  std::int64_t sample_bytes = 200;  ///< generated after training
  double temperature = 0.5;         ///< of the sample; 0 takes the likeliest byte
};

/// Throws OptionError naming the first option that is out of range.
void validate(const TrainOptions& options);

/// The configuration as JSON text: every option that decides what is computed, and nothing else
/// (not paths, ranks or number of steps), and what tells the text from others. Keys are the
/// options' names without dashes. A run continues a checkpoint whose description is equal.
std::string describe_run(const TrainOptions& options, const TextData& text);

}  // namespace megamoe::trainer
