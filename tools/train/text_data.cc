#include "train/text_data.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "megamoe/error.h"
#include "train/checksum.h"
#include "train/counter_rng.h"

namespace megamoe::trainer {
namespace {

constexpr std::int64_t kMaxHeldOutBytes = 64 * 1024;
constexpr int kNumByteValues = 256;

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, "text file " + name + ": " + why);
}

}  // namespace

TextData TextData::load(const std::string& path, std::int64_t context) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) refuse(path, "is a directory");
  if (std::filesystem::is_character_file(status)) refuse(path, "is a device, which has no end");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(path, std::string("cannot be opened: ") + std::strerror(errno));
  std::vector<std::uint8_t> bytes;
  std::array<char, 1 << 16> chunk;
  do {
    file.read(chunk.data(), chunk.size());
    bytes.insert(bytes.end(), chunk.data(), chunk.data() + file.gcount());
  } while (file);
  if (file.bad()) refuse(path, "cannot be read");
  return TextData(std::move(bytes), context, path);
}

TextData::TextData(std::vector<std::uint8_t> bytes, std::int64_t context, const std::string& name)
    : bytes_(std::move(bytes)), context_(context) {
  const auto size = static_cast<std::int64_t>(bytes_.size());
  if (size == 0) refuse(name, "is empty");
  const std::int64_t num_held_out = std::clamp<std::int64_t>(size / 10, 1, kMaxHeldOutBytes);
  // The first sample has `context` bytes and a target, all of the training part.
  if (size - num_held_out < context + 1) {
    // The held-out tail takes a tenth of what is needed, rounded up.
    std::int64_t needed = context + 2;
    while (needed - std::clamp<std::int64_t>(needed / 10, 1, kMaxHeldOutBytes) < context + 1) {
      ++needed;
    }
    refuse(name, "is too short: it has " + std::to_string(size) + " bytes, a context of " +
                     std::to_string(context) + " bytes needs at least " + std::to_string(needed));
  }
  num_train_bytes_ = size - num_held_out;
}

std::uint64_t TextData::checksum() const {
  return trainer::checksum(std::as_bytes(std::span(bytes_)));
}

void TextData::copy_sample(std::int64_t target_position, std::span<std::uint8_t> context,
                           std::uint8_t& target) const {
  std::copy_n(bytes_.begin() + target_position - context_, context_, context.begin());
  target = bytes_[static_cast<std::size_t>(target_position)];
}

void TextData::training_samples(std::uint64_t seed, std::uint64_t first,
                                std::span<std::uint8_t> contexts,
                                std::span<std::uint8_t> targets) const {
  const CounterRng rng(seed, RandomStream::batches);
  const auto num_positions = static_cast<std::uint64_t>(num_train_bytes_ - context_);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const auto offset = static_cast<std::int64_t>(rng.below(first + i, num_positions));
    copy_sample(context_ + offset, contexts.subspan(i * context_, context_), targets[i]);
  }
}

void TextData::held_out_samples(std::int64_t first, std::span<std::uint8_t> contexts,
                                std::span<std::uint8_t> targets) const {
  for (std::size_t i = 0; i < targets.size(); ++i) {
    copy_sample(num_train_bytes_ + first + static_cast<std::int64_t>(i),
                contexts.subspan(i * context_, context_), targets[i]);
  }
}

std::span<const std::uint8_t> TextData::prompt() const {
  const std::span<const std::uint8_t> train = std::span(bytes_).first(num_train_bytes_);
  const std::int64_t middle = std::max(context_, num_train_bytes_ / 2);
  const auto line_end = std::find(train.begin() + middle - 1, train.end(), '\n');
  const std::int64_t end = line_end == train.end() ? middle : line_end - train.begin() + 1;
  return train.subspan(end - context_, context_);
}

double TextData::unigram_loss() const {
  std::array<std::int64_t, kNumByteValues> counts{};
  for (std::int64_t i = 0; i < num_train_bytes_; ++i) ++counts[bytes_[i]];
  double total = 0;
  for (std::size_t i = num_train_bytes_; i < bytes_.size(); ++i) {
    total -= std::log(static_cast<double>(counts[bytes_[i]] + 1) /
                      static_cast<double>(num_train_bytes_ + kNumByteValues));
  }
  return total / static_cast<double>(num_held_out_bytes());
}

}  // namespace megamoe::trainer
