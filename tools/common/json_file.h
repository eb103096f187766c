// JSON results as files.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace megamoe::tools {

/// A JSON file that appears whole or not at all: written under a temporary name, then renamed.
class JsonFile {
 public:
  /// Opens the temporary file, so that a path that cannot be written is refused before the work.
  /// Throws CommandFailed naming the path and the reason.
  explicit JsonFile(const std::string& path);
  JsonFile(const JsonFile&) = delete;
  JsonFile& operator=(const JsonFile&) = delete;
  /// Removes the temporary file if nothing was written.
  ~JsonFile();

  /// Once. Throws CommandFailed as the constructor does.
  void write(const nlohmann::ordered_json& json);

 private:
  std::string path_;
  std::string temporary_;
  std::ofstream file_;
  bool written_ = false;
};

}  // namespace megamoe::tools
