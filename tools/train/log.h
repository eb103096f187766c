// What a training run reports, and its log: one JSON object a line.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace megamoe::trainer {

/// After every step. Losses are in nats a byte.
struct StepRecord {
  std::int64_t step = 0;  ///< 1 is the first
  double loss = 0;        ///< mean cross entropy over the global batch, before the step
  double aux_loss = 0;    ///< what the balancing losses add to it
  double tokens_per_s = 0;
  double load_max_over_mean = 0;  ///< rows of the busiest expert over the mean; the worst block
  double learning_rate = 0;
  double gradient_norm = 0;  ///< before clipping
};

/// After the last step.
struct FinalRecord {
  std::int64_t step = 0;
  double held_out_loss = 0;
  double unigram_loss = 0;  ///< TextData::unigram_loss()
  double uniform_loss = 0;  ///< ln 256
  double train_s = 0;       ///< of this run's steps
  std::string prompt;       ///< what the sample continues; raw bytes, as are those of the sample
  std::string sample;
};

/// UTF-8 stays as it is; bytes that are not part of it, and control characters other than newline
/// and tab, become \xNN.
std::string readable(const std::string& bytes);

/// One line without its end. A step record has the keys step, loss, aux_loss, tokens_per_s,
/// load_max_over_mean, learning_rate, gradient_norm; the final one step, held_out_loss,
/// unigram_loss, uniform_loss, train_s, prompt and sample. Only step records have `loss`.
std::string to_json(const StepRecord& record);
std::string to_json(const FinalRecord& record);

enum class LogStart : std::uint8_t { replace, append };

class JsonLog {
 public:
  /// Throws Error (invalid_argument) naming `path` when it cannot be written.
  JsonLog(const std::string& path, LogStart start);

  /// Writes a line and flushes it, so that a run that dies leaves what it had. Throws Error
  /// (internal) naming the path.
  void write(const std::string& line);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace megamoe::trainer
