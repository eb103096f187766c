// The order in which ranks that share a GPU enqueue their calls.
//
// Such ranks are threads of one process whose kernels wait for each other. CUDA may put streams of
// two ranks into one hardware queue, and some calls of its host interface return only when kernels
// that run have ended: a kernel must never wait for one that is not enqueued yet. So the hosts meet
// before they enqueue a wait. Every kernel then depends on what was enqueued before it alone, and
// whatever CUDA does with the queues, the first of those that are left can run.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace megamoe {

class EnqueueOrder {
 public:
  using Seconds = std::chrono::duration<double>;
  enum class Meeting { complete, late, hopeless };

  explicit EnqueueOrder(int num_ranks);

  /// `rank` has enqueued all that its peers await at `point` and before. Points only grow.
  void reach(int rank, std::uint64_t point);

  /// Returns once all ranks have reached `point`, else after `patience`, or where a rank has not
  /// and `has_left(rank)`, which is asked from time to time.
  Meeting await(std::uint64_t point, Seconds patience, const std::function<bool(int)>& has_left);

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
  std::vector<std::uint64_t> points_R_;
};

}  // namespace megamoe
