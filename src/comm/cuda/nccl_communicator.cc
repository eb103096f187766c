#include "comm/cuda/nccl_communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/longest_wait.h"
#include "comm/cuda/nccl_library.h"
#include "comm/peer_watch.h"

namespace megamoe::nccl {
namespace {

using Clock = Wait::Clock;

/// For peers to end the communicator, too.
constexpr double kGoodbyeS = 10.0;

bool is_failure(ncclResult_t state) { return state != ncclSuccess && state != ncclInProgress; }

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Most calls are done at once, and enqueueing must not wait for a sleeper.
void pause(Clock::time_point start) {
  constexpr double kBusyS = 2e-3;
  if (seconds_since(start) < kBusyS) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

/// "rank 3", "ranks 3, 5"
std::string text_of(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

}  // namespace

NcclCommunicator::NcclCommunicator(const ncclUniqueId& id, Members members, ncclConfig_t config,
                                   double deadline_s)
    : members_(std::move(members)) {
  config.blocking = 0;
  const auto number = std::ranges::find(members_.ranks, members_.rank) - members_.ranks.begin();
  const ncclResult_t result = library().comm_init_rank_config(
      &comm_, static_cast<int>(members_.ranks.size()), id, static_cast<int>(number), &config);
  try {
    settle(result, "the NCCL group", deadline_s);
  } catch (...) {
    abort();
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() {
  if (comm_ == nullptr) return;
  const Library& nccl = library();
  const Clock::time_point start = Clock::now();
  ncclResult_t result = has_failed_ ? ncclInternalError : nccl.comm_finalize(comm_);
  while (!is_failure(result) && (result = state()) == ncclInProgress &&
         seconds_since(start) < kGoodbyeS) {
    pause(start);
  }
  if (result == ncclSuccess) {
    nccl.comm_destroy(comm_);
  } else {
    abort();
  }
}

void NcclCommunicator::abort() noexcept {
  if (comm_ != nullptr) library().comm_abort(std::exchange(comm_, nullptr));
}

ncclResult_t NcclCommunicator::state() const {
  if (comm_ == nullptr) return ncclInvalidUsage;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = library().comm_get_async_error(comm_, &state);
  return asked == ncclSuccess ? state : asked;
}

std::vector<int> NcclCommunicator::others() const {
  std::vector<int> others = members_.ranks;
  std::erase(others, members_.rank);
  return others;
}

void NcclCommunicator::settle(ncclResult_t result, const char* what, double deadline_s) {
  ncclResult_t now = is_failure(result) ? result : state();
  if (now == ncclSuccess) return;
  Wait wait{what, deadline_s, others(), Clock::now(), {}};
  do {
    if (const std::optional<Error> why = why_over(wait, now)) {
      fail();
      throw Error(*why);
    }
    pause(*wait.began);
    if (!is_failure(now)) now = state();
  } while (now != ncclSuccess);
}

std::optional<Error> NcclCommunicator::why_over(Wait& wait, ncclResult_t state) const {
  const double deadline_s = std::min(wait.deadline_s, kLongestWaitS);
  const auto lost = [&](ErrorCode code, const std::string& how) {
    return Error(code, "rank " + std::to_string(members_.rank) + " " + how);
  };
  const auto of = [&](const std::vector<int>& ranks) {
    return std::string(wait.what) + " of " + text_of(ranks) + " " + members_.way;
  };
  // Where NCCL fails, it has lost any of them.
  std::vector<int> left = is_failure(state) ? others() : wait.ranks;
  std::erase_if(left, [&](int peer) { return !PeerWatch::has_left(members_.has_left_R, peer); });
  if (is_failure(state) || (wait.began && !left.empty())) {
    if (!wait.lost) wait.lost = Clock::now();
    const bool is_over = seconds_since(*wait.lost) > std::min(kGraceS, deadline_s);
    if (is_failure(state) && !left.empty()) {
      return lost(ErrorCode::peer_failed, "lost " + text_of(left) +
                                              ", which left, while it waited for " + wait.what +
                                              " " + members_.way + " (" + reason_of(state) + ")");
    }
    if (is_over && !left.empty()) {
      return lost(ErrorCode::peer_failed, "waited for " + of(left) + ", which left");
    }
    if (is_over) {
      return lost(state == ncclRemoteError ? ErrorCode::peer_failed : ErrorCode::internal,
                  "waited for " + of(wait.ranks) + ": " + reason_of(state) +
                      "; none of them is known to have left");
    }
    if (is_failure(state)) return std::nullopt;
  }
  if (!wait.began || seconds_since(*wait.began) < deadline_s) return std::nullopt;
  return lost(ErrorCode::deadline_exceeded, "waited " + std::to_string(wait.deadline_s) +
                                                " s for " + of(wait.ranks) +
                                                "; the deadline has passed");
}

}  // namespace megamoe::nccl
