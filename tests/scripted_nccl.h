// An NCCL that does what a test says, and of CUDA what the code beside it asks for: so that what
// waits for NCCL can be tested without devices. Each rank of a communicator has a script of its
// own.
#pragma once

#include <nccl.h>

#include <array>
#include <atomic>

namespace megamoe::scripted {

/// What NCCL does for a rank, by its number in the communicator.
struct Rank {
  std::atomic<ncclResult_t> state{ncclSuccess};  ///< of its communicator, asynchronously
  std::atomic<ncclResult_t> sending{ncclSuccess};
  std::atomic<ncclResult_t> registering{ncclSuccess};
  /// A registration stays under way, as where a peer does not come to it.
  std::atomic<bool> registers_for_ever{false};
  std::atomic<int> num_made{0};
  std::atomic<int> num_aborted{0};
  std::atomic<int> num_destroyed{0};
  std::atomic<int> num_windows{0};

  void reset() {
    state = sending = registering = ncclSuccess;
    registers_for_ever = false;
    num_made = num_aborted = num_destroyed = num_windows = 0;
  }
};

struct Nccl {
  std::array<Rank, 4> ranks;
  std::atomic<int> num_allocations{0};           ///< that live
  std::atomic<int> num_allocations_at_abort{0};  ///< that lived at the last one
};

/// The one that MEGAMOE_SCRIPTED_NCCL, which the library loads, plays; from its beginning.
Nccl& fresh_nccl();

/// What CUDA does, for all ranks; memory is the host's.
struct Cuda {
  std::atomic<bool> stream_is_done{true};
  std::atomic<int> num_events_done{0};  ///< of those that are recorded while it is not done
  std::atomic<int> num_events_recorded{0};
  std::atomic<bool> has_memory{true};
  std::atomic<const void*> unmapped{nullptr};  ///< an address at which no device has memory
  std::atomic<int> num_allocations{0};         ///< that live
};
Cuda& cuda();

}  // namespace megamoe::scripted
