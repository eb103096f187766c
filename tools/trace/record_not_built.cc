// A build whose kernels record nothing.
#include "megamoe/error.h"
#include "trace/record.h"

namespace megamoe::timeline {

bool can_record() { return false; }

std::vector<GpuTimeline> record_pass(const LayerConfig& /*config*/,
                                     const std::vector<std::vector<std::int32_t>>& /*ids_RTK*/,
                                     Pass /*pass*/) {
  throw Error(ErrorCode::unsupported, "this build records nothing (MEGAMOE_TRACE is off)");
}

}  // namespace megamoe::timeline
