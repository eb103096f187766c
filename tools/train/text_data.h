// The text: its training part, its held-out tail, and the samples of a batch.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace megamoe::trainer {

/// A text split into a training part and a held-out tail: the last tenth, at least one byte and at
/// most 64 KiB. A sample is `context` bytes and the byte that follows them.
class TextData {
 public:
  /// Throws megamoe::Error (invalid_argument) naming the file when it cannot be read or is too
  /// short for `context`.
  static TextData load(const std::string& path, std::int64_t context);
  /// The same for bytes in memory; `name` stands for the file in errors.
  TextData(std::vector<std::uint8_t> bytes, std::int64_t context, const std::string& name);

  [[nodiscard]] std::int64_t context() const { return context_; }
  [[nodiscard]] std::int64_t num_train_bytes() const { return num_train_bytes_; }
  [[nodiscard]] std::int64_t num_held_out_bytes() const {
    return static_cast<std::int64_t>(bytes_.size()) - num_train_bytes_;
  }
  /// Of the whole text, for recognising it again.
  [[nodiscard]] std::uint64_t checksum() const;

  /// Writes the context and target of training samples [first, first + targets.size()): sample i is
  /// the same whoever asks. Samples are drawn with replacement.
  void training_samples(std::uint64_t seed, std::uint64_t first, std::span<std::uint8_t> contexts,
                        std::span<std::uint8_t> targets) const;
  /// Those whose target is held-out byte first, first + 1, ...; the first contexts reach back into
  /// the training part.
  void held_out_samples(std::int64_t first, std::span<std::uint8_t> contexts,
                        std::span<std::uint8_t> targets) const;
  /// `context` training bytes that end with a line, in the middle of the training part: where
  /// generation starts. Any bytes of the middle when there is no end of line.
  [[nodiscard]] std::span<const std::uint8_t> prompt() const;

  /// Cross entropy, in nats a byte, of the held-out part under the frequencies of bytes in the
  /// training part, each count raised by one (add-one smoothing over 256 bytes).
  [[nodiscard]] double unigram_loss() const;

 private:
  void copy_sample(std::int64_t target_position, std::span<std::uint8_t> context,
                   std::uint8_t& target) const;

  std::vector<std::uint8_t> bytes_;
  std::int64_t context_;
  std::int64_t num_train_bytes_ = 0;
};

}  // namespace megamoe::trainer
