#include "cpu/thread_pool.h"

#include <string>
#include <system_error>
#include <utility>

#include "megamoe/error.h"

namespace megamoe::cpu {

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads < 1) {
    throw Error(ErrorCode::invalid_argument,
                "num_threads is " + std::to_string(num_threads) + ", must be at least 1");
  }
  workers_.reserve(static_cast<std::size_t>(num_threads - 1));
  try {
    for (int thread_idx = 1; thread_idx < num_threads; ++thread_idx) {
      workers_.emplace_back([this, thread_idx] { work(thread_idx); });
    }
  } catch (const std::system_error& error) {
    const std::size_t num_started = workers_.size();
    stop();
    throw Error(ErrorCode::out_of_memory, "num_threads is " + std::to_string(num_threads) +
                                              ", but after " + std::to_string(num_started) +
                                              " workers the system refused: " + error.what());
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  loop_posted_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::parallel_for(std::int64_t num_tasks, Task task) {
  if (num_tasks <= 0) return;
  if (loop_running_.exchange(true, std::memory_order_acquire)) {
    throw Error(ErrorCode::internal, "ThreadPool::parallel_for was called while a loop is running");
  }
  {
    const std::lock_guard lock(mutex_);
    next_task_.store(0, std::memory_order_relaxed);
    task_ = &task;
    num_tasks_ = num_tasks;
    ++loop_number_;
  }
  // The caller takes a task itself: a single one wakes nobody.
  if (num_tasks > 1) loop_posted_.notify_all();
  run_tasks(task, num_tasks, 0);

  std::exception_ptr exception;
  {
    // Every task has been claimed. Workers that have not woken up yet find no loop and are not
    // waited for; those inside are finishing their last task.
    std::unique_lock lock(mutex_);
    task_ = nullptr;
    worker_left_.wait(lock, [this] { return num_workers_inside_ == 0; });
    exception = std::exchange(first_exception_, nullptr);
  }
  loop_running_.store(false, std::memory_order_release);
  if (exception) std::rethrow_exception(exception);
}

void ThreadPool::work(int thread_idx) {
  std::uint64_t last_loop = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    loop_posted_.wait(lock,
                      [&] { return stopping_ || (task_ != nullptr && loop_number_ != last_loop); });
    if (stopping_) return;
    last_loop = loop_number_;
    const Task* task = task_;
    const std::int64_t num_tasks = num_tasks_;
    ++num_workers_inside_;
    lock.unlock();
    run_tasks(*task, num_tasks, thread_idx);
    lock.lock();
    if (--num_workers_inside_ == 0) worker_left_.notify_one();
  }
}

void ThreadPool::run_tasks(const Task& task, std::int64_t num_tasks, int thread_idx) {
  // The mutex orders the tasks' memory with the caller's; the counter only hands out indices.
  for (;;) {
    const std::int64_t task_idx = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task_idx >= num_tasks) return;
    try {
      task(task_idx, thread_idx);
    } catch (...) {
      next_task_.store(num_tasks, std::memory_order_relaxed);
      const std::lock_guard lock(mutex_);
      if (!first_exception_) first_exception_ = std::current_exception();
    }
  }
}

}  // namespace megamoe::cpu
