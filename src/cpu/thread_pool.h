// Worker threads that share out the tasks of a loop.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "base/function_ref.h"

namespace megamoe::cpu {

/// num_threads - 1 workers and the caller. The workers sleep between loops: ranks that are threads
/// of one process have a pool each, and spinning ones would take the cores from each other.
class ThreadPool {
 public:
  using Task = FunctionRef<void(std::int64_t task_idx, int thread_idx)>;

  /// With num_threads = 1 there are no workers and loops run in order on the caller. Throws Error
  /// for num_threads < 1 and where the system gives no thread.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  [[nodiscard]] int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls task(i, thread_idx) once for each i in [0, num_tasks), in no fixed order and on any
  /// thread, and returns when all calls have. thread_idx in [0, num_threads) is the caller's own
  /// while the call runs (0 is the caller): use it for scratch. Allocates nothing. If a task
  /// throws, tasks not yet begun are dropped and the first exception is rethrown here. One loop at
  /// a time: a call from a task or from a second thread throws Error(internal).
  void parallel_for(std::int64_t num_tasks, Task task);

 private:
  void stop();
  void work(int thread_idx);
  void run_tasks(const Task& task, std::int64_t num_tasks, int thread_idx);

  std::atomic<std::int64_t> next_task_{0};
  std::atomic<bool> loop_running_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable loop_posted_;
  std::condition_variable worker_left_;
  const Task* task_ = nullptr;  // null between loops
  std::int64_t num_tasks_ = 0;
  std::uint64_t loop_number_ = 0;
  int num_workers_inside_ = 0;
  bool stopping_ = false;
  std::exception_ptr first_exception_;

  std::vector<std::thread> workers_;
};

}  // namespace megamoe::cpu
