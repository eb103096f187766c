// What all records of a run of a benchmark share.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace megamoe::bench {

struct RunInfo {
  std::string command;
  std::string date;  ///< ISO 8601, UTC
  std::string run;   ///< one id for all records of the run
};

RunInfo run_info(std::string command);

/// Adds it to a record, with what the program was built from.
void append_run(nlohmann::ordered_json& record, const RunInfo& run, const std::string& hardware);

}  // namespace megamoe::bench
