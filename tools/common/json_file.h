// JSON results as files.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace megamoe::tools {

/// Writes to a temporary name beside `path` and renames, so that `path` is never half-written.
/// Throws CommandFailed naming the path and the reason.
void write_json_file(const std::string& path, const nlohmann::ordered_json& json);

}  // namespace megamoe::tools
