// JSON results as files.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace megamoe::tools {

/// A JSON file that appears whole or not at all: written under a temporary name, then renamed.
class JsonFile {
 public:
  /// Tries the temporary file and removes it again: a path that cannot be written is refused before
  /// the work, and work that is interrupted leaves nothing. Throws CommandFailed naming the path
  /// and the reason.
  explicit JsonFile(const std::string& path);

  /// Throws CommandFailed as the constructor does.
  void write(const nlohmann::ordered_json& json);

 private:
  std::string path_;
  std::string temporary_;
};

}  // namespace megamoe::tools
