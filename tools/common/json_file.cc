#include "common/json_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "commands/commands.h"

namespace megamoe::tools {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  throw CommandFailed("cannot write " + path + ": " + why);
}

}  // namespace

JsonFile::JsonFile(const std::string& path)
    : path_(path), temporary_(path + ".tmp." + std::to_string(::getpid())) {
  // What a rename would replace must be a file of the same kind, not /dev/null.
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    fail(path, "it is not a regular file");
  }
  errno = 0;
  if (!std::ofstream(temporary_)) fail(path, std::strerror(errno));
  std::remove(temporary_.c_str());
}

void JsonFile::write(const nlohmann::ordered_json& json) {
  errno = 0;
  std::ofstream file(temporary_);
  file << json.dump(2) << '\n';
  file.close();
  if (!file || std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const std::string why = std::strerror(errno);
    std::remove(temporary_.c_str());
    fail(path_, why);
  }
}

}  // namespace megamoe::tools
