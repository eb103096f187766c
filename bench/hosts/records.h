// The records of a run, and what all of them say about it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "bench/run_info.h"
#include "megamoe/topology.h"

namespace megamoe::bench {

using Json = nlohmann::ordered_json;

/// What all records of the run say about it.
struct Machine {
  RunInfo run;
  std::string hardware;
  std::string network;
  Json versions;
};

/// `command`: that started the benchmark.
Machine machine_of(const std::string& command, const Topology& topology, int device);

/// Adds `record` of a measurement, and what is known of the run, to `records`.
void append(Json& records, Json record, const Machine& machine);

}  // namespace megamoe::bench
