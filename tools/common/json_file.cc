#include "common/json_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "commands/commands.h"

namespace megamoe::tools {

void write_json_file(const std::string& path, const nlohmann::ordered_json& json) {
  const auto fail = [&](const std::string& at) {
    throw CommandFailed("cannot write " + at + ": " + std::strerror(errno));
  };
  const std::string temporary = path + ".tmp";
  std::ofstream file(temporary);
  if (!file) fail(temporary);
  file << json.dump(2) << '\n';
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const int reason = errno;
    std::remove(temporary.c_str());
    errno = reason;
    fail(path);
  }
}

}  // namespace megamoe::tools
