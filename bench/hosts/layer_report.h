// Times of a layer over hosts as text, as a record and as a timeline.
#pragma once

#include <string>

#include "layer_times.h"
#include "megamoe/topology.h"
#include "options.h"
#include "records.h"

namespace megamoe::bench {

/// How calls ran.
struct Way {
  Overlap overlap;
  int asked_groups;  ///< 0: as by default
  int ctas;          ///< of a transfer
};

/// To standard output.
void print(const Way& way, const LayerTimes& times, const AllAlone& alone);

Json record_of(const Options& options, const Topology& topology, const Way& way,
               const LayerTimes& times, const AllAlone& alone);

/// Files of the last forward and the last backward call, whose names begin with `path`. Perfetto
/// and chrome://tracing read them.
void write_traces(const std::string& path, const Way& way, const LayerTimes& times);

}  // namespace megamoe::bench
