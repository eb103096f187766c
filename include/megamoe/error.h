// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>

namespace megamoe {

/// What went wrong, for callers that decide by code. The message names the argument, value and
/// place.
enum class ErrorCode {
  invalid_argument,        ///< a shape, dtype, stride or option that is wrong whatever the machine
  unsupported,             ///< valid, but not built, not written yet or not possible on this device
  config_mismatch,         ///< ranks disagree about the configuration or about the call being made
  expert_id_out_of_range,  ///< an expert id that is neither -1 nor in [0, num_experts)
  capacity_exceeded,       ///< a rank would receive more rows than its row capacity
  deadline_exceeded,  ///< a peer did not arrive in time; the communicator is unusable afterwards
  peer_failed,        ///< a peer failed or left; the message names it
  out_of_memory,      ///< an allocation failed; the message has the size asked for
  internal,           ///< a broken invariant of the library itself
};

/// Returns the code's name as it is spelt in the enum, for messages and logs.
const char* to_string(ErrorCode code);

/// Thrown by every function of the library; the library never prints and never exits.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace megamoe
