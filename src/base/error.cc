#include "megamoe/error.h"

namespace megamoe {

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return "invalid_argument";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::config_mismatch:
      return "config_mismatch";
    case ErrorCode::expert_id_out_of_range:
      return "expert_id_out_of_range";
    case ErrorCode::capacity_exceeded:
      return "capacity_exceeded";
    case ErrorCode::deadline_exceeded:
      return "deadline_exceeded";
    case ErrorCode::peer_failed:
      return "peer_failed";
    case ErrorCode::out_of_memory:
      return "out_of_memory";
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

}  // namespace megamoe
