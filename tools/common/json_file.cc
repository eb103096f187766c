#include "common/json_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "commands/commands.h"

namespace megamoe::tools {
namespace {

[[noreturn]] void fail(const std::string& path) {
  throw CommandFailed("cannot write " + path + ": " + std::strerror(errno));
}

}  // namespace

JsonFile::JsonFile(const std::string& path)
    : path_(path), temporary_(path + ".tmp"), file_(temporary_) {
  if (!file_) fail(path_);
}

JsonFile::~JsonFile() {
  if (!written_) std::remove(temporary_.c_str());
}

void JsonFile::write(const nlohmann::ordered_json& json) {
  file_ << json.dump(2) << '\n';
  file_.close();
  if (!file_ || std::rename(temporary_.c_str(), path_.c_str()) != 0) fail(path_);
  written_ = true;
}

}  // namespace megamoe::tools
