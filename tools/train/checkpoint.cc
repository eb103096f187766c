#include "train/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>

#include "megamoe/error.h"
#include "train/checksum.h"

namespace megamoe::trainer {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie");

constexpr std::string_view kMagic = "MMOETRN1";
constexpr std::uint32_t kFormatVersion = 1;

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, "checkpoint " + path + ": " + why);
}

std::string system_reason() { return std::strerror(errno); }

/// The name that is written before the rename; other processes may be writing `path` as well.
std::string temporary_name(const std::string& path) {
  return path + ".tmp." + std::to_string(::getpid());
}

/// A file under its temporary name; removed unless committed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path)
      : path_(path),
        temporary_path_(temporary_name(path)),
        descriptor_(
            ::open(temporary_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
    if (descriptor_ < 0) {
      refuse(path, "cannot create " + temporary_path_ + ": " + system_reason());
    }
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (descriptor_ >= 0) {
      ::close(descriptor_);
      ::unlink(temporary_path_.c_str());
    }
  }

  void write(std::span<const std::byte> bytes) {
    checksum_ = checksum(bytes, checksum_);
    while (!bytes.empty()) {
      const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail("write");
      bytes = bytes.subspan(static_cast<std::size_t>(written));
    }
  }
  template <class T>
  void write_number(T value) {
    write(std::as_bytes(std::span(&value, 1)));
  }
  [[nodiscard]] std::uint64_t checksum_so_far() const { return checksum_; }

  /// The data first, then the name, then the directory that holds the name.
  void commit() {
    if (::fsync(descriptor_) != 0) fail("flush");
    if (::rename(temporary_path_.c_str(), path_.c_str()) != 0) fail("rename");
    ::close(descriptor_);
    descriptor_ = -1;
    const std::filesystem::path parent = std::filesystem::path(path_).parent_path();
    const int directory = ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY);
    if (directory >= 0) {
      ::fsync(directory);  // not every file system can; the file itself is safe
      ::close(directory);
    }
  }

 private:
  [[noreturn]] void fail(const char* action) {
    throw Error(ErrorCode::internal, "checkpoint " + path_ + ": cannot " + action + " " +
                                         temporary_path_ + ": " + system_reason());
  }

  std::string path_;
  std::string temporary_path_;
  int descriptor_;
  std::uint64_t checksum_ = kEmptyChecksum;
};

/// Takes numbers and floats off the front of a file's bytes; every length was checked before.
class Reader {
 public:
  Reader(const std::string& path, std::span<const std::byte> bytes) : path_(path), bytes_(bytes) {}

  std::span<const std::byte> take(std::uint64_t count) {
    if (count > bytes_.size()) refuse(path_, "is cut or altered: its parts do not fit its length");
    const std::span<const std::byte> front = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return front;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::vector<float> floats(std::uint64_t count) {
    if (count > bytes_.size() / sizeof(float)) refuse(path_, "is cut or altered: too few numbers");
    const std::span<const std::byte> bytes = take(count * sizeof(float));
    std::vector<float> values(count);
    if (count > 0) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  GroupState group(std::uint64_t count) {
    GroupState state;
    for (auto* part : {&state.values, &state.first_moments, &state.second_moments}) {
      *part = floats(count);
    }
    return state;
  }

 private:
  const std::string& path_;
  std::span<const std::byte> bytes_;
};

std::vector<std::byte> read_file(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) refuse(path, "is a directory");
  if (std::filesystem::is_character_file(status)) refuse(path, "is a device, which has no end");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(path, "cannot be opened: " + system_reason());
  std::vector<std::byte> bytes;
  std::array<std::byte, 1 << 16> chunk;
  do {
    file.read(reinterpret_cast<char*>(chunk.data()), chunk.size());
    bytes.insert(bytes.end(), chunk.begin(), chunk.begin() + file.gcount());
  } while (file);
  if (file.bad()) refuse(path, "cannot be read");
  return bytes;
}

/// The options that differ, each as "--hidden is 64 there and 128 here".
std::string differences(const std::string& there_text, const std::string& here_text) {
  const auto there = nlohmann::ordered_json::parse(there_text, nullptr, false);
  const auto here = nlohmann::ordered_json::parse(here_text, nullptr, false);
  std::string list;
  for (const auto& [name, value] : here.items()) {
    const std::string other = there.contains(name) ? there[name].dump() : "not known";
    if (other == value.dump()) continue;
    if (!list.empty()) list += ", ";
    list.append("--").append(name).append(" is ").append(other);
    list.append(" there and ").append(value.dump()).append(" here");
  }
  return list.empty() ? "it has options that are not known here" : list;
}

std::uint64_t total_bytes(const Checkpoint& checkpoint) {
  const std::uint64_t floats = 3 * checkpoint.shared.values.size() +
                               3 * checkpoint.experts.values.size() +
                               checkpoint.selection_bias.size();
  return kMagic.size() + 2 * sizeof(std::uint32_t) + checkpoint.description.size() +
         6 * sizeof(std::uint64_t) + floats * sizeof(float);
}

}  // namespace

void check_checkpoint_path(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) refuse(path, "is a directory");
  // The rename would replace a device by a file.
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    refuse(path, "is not a regular file");
  }
  const TemporaryFile probe(path);
}

void write_checkpoint(const std::string& path, const Checkpoint& checkpoint) {
  TemporaryFile file(path);
  file.write(std::as_bytes(std::span(kMagic)));
  file.write_number(kFormatVersion);
  file.write_number(static_cast<std::uint32_t>(checkpoint.description.size()));
  file.write(std::as_bytes(std::span(checkpoint.description)));
  file.write_number(static_cast<std::uint64_t>(checkpoint.step));
  file.write_number<std::uint64_t>(checkpoint.shared.values.size());
  file.write_number<std::uint64_t>(checkpoint.experts.values.size());
  file.write_number<std::uint64_t>(checkpoint.selection_bias.size());
  file.write_number<std::uint64_t>(total_bytes(checkpoint));
  for (const GroupState* group : {&checkpoint.shared, &checkpoint.experts}) {
    for (const auto* part : {&group->values, &group->first_moments, &group->second_moments}) {
      file.write(std::as_bytes(std::span(*part)));
    }
  }
  file.write(std::as_bytes(std::span(checkpoint.selection_bias)));
  file.write_number(file.checksum_so_far());
  file.commit();
}

Checkpoint read_checkpoint(const std::string& path, const std::string& description) {
  const std::vector<std::byte> bytes = read_file(path);
  Reader reader(path, bytes);
  if (bytes.size() < kMagic.size())
    refuse(path, "is cut: it has only " + std::to_string(bytes.size()) + " bytes");
  if (std::memcmp(reader.take(kMagic.size()).data(), kMagic.data(), kMagic.size()) != 0) {
    refuse(path, "is not a checkpoint of megamoe train, or its beginning is altered");
  }
  const auto version = reader.number<std::uint32_t>();
  if (version != kFormatVersion) {
    refuse(path, "has format version " + std::to_string(version) + ", this program reads " +
                     std::to_string(kFormatVersion));
  }
  Checkpoint checkpoint;
  const auto text = reader.take(reader.number<std::uint32_t>());
  checkpoint.description.assign(reinterpret_cast<const char*>(text.data()), text.size());
  checkpoint.step = static_cast<std::int64_t>(reader.number<std::uint64_t>());
  const auto num_shared = reader.number<std::uint64_t>();
  const auto num_experts = reader.number<std::uint64_t>();
  const auto num_biases = reader.number<std::uint64_t>();
  const auto num_bytes = reader.number<std::uint64_t>();
  if (bytes.size() != num_bytes) {
    refuse(path, "is cut or altered: it has " + std::to_string(bytes.size()) + " of " +
                     std::to_string(num_bytes) + " bytes");
  }
  const std::span content = std::span(bytes).first(bytes.size() - sizeof(std::uint64_t));
  Reader trailer(path, std::span(bytes).last(sizeof(std::uint64_t)));
  if (trailer.number<std::uint64_t>() != checksum(content)) {
    refuse(path, "is altered: its checksum does not match its content");
  }
  if (checkpoint.description != description) {
    refuse(path,
           "is of another configuration: " + differences(checkpoint.description, description));
  }
  checkpoint.shared = reader.group(num_shared);
  checkpoint.experts = reader.group(num_experts);
  checkpoint.selection_bias = reader.floats(num_biases);
  return checkpoint;
}

}  // namespace megamoe::trainer
