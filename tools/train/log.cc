#include "train/log.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "megamoe/error.h"

namespace megamoe::trainer {
namespace {

/// Length of the UTF-8 sequence that begins at `index`, 0 if none does (RFC 3629, table of section
/// 4: no overlong forms, no surrogates, nothing above U+10FFFF).
std::size_t utf8_length(const std::string& bytes, std::size_t index) {
  const auto byte = [&](std::size_t offset) -> unsigned {
    const std::size_t at = index + offset;
    return at < bytes.size() ? static_cast<unsigned char>(bytes[at]) : 0U;
  };
  const auto continues = [&](std::size_t offset) { return (byte(offset) & 0xc0U) == 0x80U; };
  const unsigned lead = byte(0);
  const unsigned second = byte(1);
  if (lead < 0x80U) return 1;
  if (lead >= 0xc2U && lead <= 0xdfU) return continues(1) ? 2 : 0;
  if (lead >= 0xe0U && lead <= 0xefU) {
    const bool allowed = !(lead == 0xe0U && second < 0xa0U) && !(lead == 0xedU && second > 0x9fU);
    return allowed && continues(1) && continues(2) ? 3 : 0;
  }
  if (lead >= 0xf0U && lead <= 0xf4U) {
    const bool allowed = !(lead == 0xf0U && second < 0x90U) && !(lead == 0xf4U && second > 0x8fU);
    return allowed && continues(1) && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

bool is_control(unsigned char byte) {
  return (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f;
}

}  // namespace

std::string readable(const std::string& bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes.size();) {
    const std::size_t length = utf8_length(bytes, i);
    const auto byte = static_cast<unsigned char>(bytes[i]);
    if (length == 0 || (length == 1 && is_control(byte))) {
      std::array<char, 5> escape;
      std::snprintf(escape.data(), escape.size(), "\\x%02x", byte);
      text += escape.data();
      ++i;
    } else {
      text.append(bytes, i, length);
      i += length;
    }
  }
  return text;
}

std::string to_json(const StepRecord& record) {
  const nlohmann::ordered_json json = {
      {"step", record.step},
      {"loss", record.loss},
      {"aux_loss", record.aux_loss},
      {"tokens_per_s", record.tokens_per_s},
      {"load_max_over_mean", record.load_max_over_mean},
      {"learning_rate", record.learning_rate},
      {"gradient_norm", record.gradient_norm},
  };
  return json.dump();
}

std::string to_json(const FinalRecord& record) {
  const nlohmann::ordered_json json = {
      {"step", record.step},
      {"held_out_loss", record.held_out_loss},
      {"unigram_loss", record.unigram_loss},
      {"uniform_loss", record.uniform_loss},
      {"train_s", record.train_s},
      {"prompt", readable(record.prompt)},
      {"sample", readable(record.sample)},
  };
  return json.dump();
}

JsonLog::JsonLog(const std::string& path, LogStart start) : path_(path) {
  errno = 0;
  file_.open(path, start == LogStart::append ? std::ios::app : std::ios::trunc);
  if (!file_) {
    throw Error(ErrorCode::invalid_argument,
                "log " + path + ": cannot be written: " + std::strerror(errno));
  }
}

void JsonLog::write(const std::string& line) {
  errno = 0;
  file_ << line << '\n' << std::flush;
  if (!file_) {
    throw Error(ErrorCode::internal,
                "log " + path_ + ": cannot be written: " + std::strerror(errno));
  }
}

}  // namespace megamoe::trainer
