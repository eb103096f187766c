#include "bench/run_info.h"

#include <cstdio>
#include <ctime>
#include <random>
#include <utility>

#include "common/build_info.h"

namespace megamoe::bench {

void append_run(nlohmann::ordered_json& record, const RunInfo& run, const std::string& hardware) {
  const tools::BuildInfo build = tools::build_info();
  record["commit"] = build.commit;
  record["date"] = run.date;
  record["hardware"] = hardware;
  record["versions"] = {
      {"megamoe", build.version}, {"compiler", build.compiler}, {"build", build.build_type}};
  record["command"] = run.command;
  record["run"] = run.run;
}

RunInfo run_info(std::string command) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char date[32];
  std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &utc);
  char id[16];
  std::snprintf(id, sizeof(id), "%08x", std::random_device{}());
  return {std::move(command), date, std::string(date) + "-" + id};
}

}  // namespace megamoe::bench
