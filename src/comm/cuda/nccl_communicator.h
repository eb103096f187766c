// An NCCL communicator in which nobody is waited for without end.
#pragma once

#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megamoe/error.h"

namespace megamoe::nccl {

/// Who joins a communicator.
struct Members {
  int rank = 0;                               ///< this one
  std::vector<int> ranks;                     ///< of the group, by their numbers in NCCL's
  const char* way = "";                       ///< "by network": how they reach each other
  const std::uint32_t* has_left_R = nullptr;  ///< the words of this rank's PeerWatch
};

/// What this rank waits for, and what it has noticed meanwhile.
struct Wait {
  using Clock = std::chrono::steady_clock;
  const char* what = nullptr;
  double deadline_s = 0.0;  ///< from `began` on
  std::vector<int> ranks;   ///< whose part is awaited
  std::optional<Clock::time_point> began;
  std::optional<Clock::time_point> lost;  ///< first sign that NCCL or one of them has failed
};

/// NCCL's calls return before they are done: this class asks how they fare, so that a peer that
/// never comes is a deadline and one that leaves an error with its name.
class NcclCommunicator {
 public:
  /// For whom a peer has left, or who NCCL says that a connection has failed: what had been sent
  /// may still arrive, and the group may yet say who has left. At most a wait's deadline.
  static constexpr double kGraceS = 1.0;

  /// Joins `members`, of whom this rank is one, on the current device; `config` says how, but for
  /// blocking. Collective among them. Throws as settle() does.
  NcclCommunicator(const ncclUniqueId& id, Members members, ncclConfig_t config, double deadline_s);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  /// Aborts it after fail(); else lets what is on its way arrive, and waits for nobody for long.
  ~NcclCommunicator();

  /// For calls of NCCL, whose results go to settle().
  [[nodiscard]] ncclComm_t get() const { return comm_; }
  [[nodiscard]] const Members& members() const { return members_; }

  /// Waits until NCCL has done on the host what a call has begun that returned `result`. Throws
  /// what why_over() returns, and has failed then.
  void settle(ncclResult_t result, const char* what, double deadline_s);
  /// How NCCL's calls fare, and its transfers.
  [[nodiscard]] ncclResult_t state() const;
  /// Looks once, for something that is not done: why it is over, if it is. `state` is what NCCL
  /// said before it was seen not to be done. peer_failed with the ranks that have left;
  /// deadline_exceeded with those that are awaited; where NCCL fails and nobody is known to have
  /// left, its reason (peer_failed where that is a lost connection, else internal).
  [[nodiscard]] std::optional<Error> why_over(Wait& wait, ncclResult_t state) const;

  /// Its end will be an abort. What NCCL has under way stays as it is until then.
  void fail() { has_failed_ = true; }
  /// Ends what NCCL has under way, on the device too; then the communicator is gone.
  void abort() noexcept;

 private:
  [[nodiscard]] std::vector<int> others() const;

  Members members_;
  ncclComm_t comm_ = nullptr;
  bool has_failed_ = false;
};

}  // namespace megamoe::nccl
