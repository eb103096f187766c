// Hardware queues of a GPU. Ranks that share one wait for each other within kernels. Calls are
// enqueued so that any queue will do (comm/enqueue_order.h), but replays of graphs are not: there a
// stream of one rank must not stand behind a stream of another.
#pragma once

namespace megamoe {

/// Streams that a rank's call runs on at the same time.
inline constexpr int kStreamsPerRank = 2;

/// The queues that CUDA makes for a process on a device: CUDA_DEVICE_MAX_CONNECTIONS where it is 1
/// to 32, otherwise CUDA's default of 8. The driver reads the variable once, when it starts.
int hardware_queues();

/// Throws unsupported where `num_ranks` ranks that share CUDA device `device` have fewer than
/// kStreamsPerRank queues each.
void require_hardware_queues(int num_ranks, int device);

}  // namespace megamoe
