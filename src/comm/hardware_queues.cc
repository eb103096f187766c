#include "comm/hardware_queues.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string>

#include "megamoe/error.h"

namespace megamoe {
namespace {

constexpr const char* kVariable = "CUDA_DEVICE_MAX_CONNECTIONS";
constexpr int kDefaultQueues = 8;
constexpr int kMaxQueues = 32;

}  // namespace

int hardware_queues() {
  const char* const text = std::getenv(kVariable);
  if (text == nullptr) return kDefaultQueues;
  int queues = 0;
  const char* const end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, queues);
  const bool is_valid = error == std::errc() && stop == end && queues >= 1 && queues <= kMaxQueues;
  return is_valid ? queues : kDefaultQueues;
}

void require_hardware_queues(int num_ranks, int device) {
  const int needed = kStreamsPerRank * num_ranks;
  const int queues = hardware_queues();
  if (num_ranks == 1 || needed <= queues) return;
  const std::string ranks = std::to_string(num_ranks) + " ranks share CUDA device " +
                            std::to_string(device) + " and need " + std::to_string(needed) +
                            " hardware queues";
  if (needed > kMaxQueues) {
    throw Error(ErrorCode::unsupported,
                ranks + "; a device has at most " + std::to_string(kMaxQueues) + ", for " +
                    std::to_string(kMaxQueues / kStreamsPerRank) + " ranks");
  }
  throw Error(ErrorCode::unsupported, ranks + "; it has " + std::to_string(queues) + ": set " +
                                          kVariable + " to " + std::to_string(needed) +
                                          " or more (at most " + std::to_string(kMaxQueues) +
                                          ") before the process first uses CUDA");
}

}  // namespace megamoe
