// Runs a layer on CUDA devices and records one pass, in builds with MEGAMOE_TRACE.
#pragma once

#include <cstdint>
#include <vector>

#include "megamoe/config.h"
#include "trace/timeline.h"

namespace megamoe::timeline {

enum class Pass { forward, backward };

/// Whether this build's kernels record what they do.
bool can_record();

/// After passes that warm up, one that is recorded; a thread a rank. Every rank has
/// config.shape.max_tokens tokens; `ids_RTK` holds each rank's ids. Times are since shortly before
/// the call, on a clock that all ranks share within some microseconds. Throws Error; unsupported
/// unless can_record().
std::vector<GpuTimeline> record_pass(const LayerConfig& config,
                                     const std::vector<std::vector<std::int32_t>>& ids_RTK,
                                     Pass pass);

}  // namespace megamoe::timeline
