// The timeline as Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing
// open.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "trace/timeline.h"

namespace megamoe::timeline {

/// A process for each GPU; in it a thread of the stream's stages, and for each of `num_sms` SMs
/// (spread over those that ran; 0: all) a thread of kernels and one for each role. Times in
/// microseconds.
nlohmann::ordered_json to_chrome_json(const std::vector<GpuTimeline>& gpus, int num_sms);

}  // namespace megamoe::timeline
