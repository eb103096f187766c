// The thread pool: every task once, thread indices that are the caller's own, exceptions, reuse.
#include "cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "megamoe/error.h"

namespace megamoe::cpu {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(NumThreads, ThreadPoolTest, testing::Values(1, 2, 3, 8));

TEST_P(ThreadPoolTest, RunsEveryTaskOnce) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.num_threads(), GetParam());
  for (const std::int64_t num_tasks : {0, 1, 2, 7, 1000}) {
    // Plain ints: a task run twice at once, or a result not visible afterwards, is a data race.
    std::vector<int> num_runs(static_cast<std::size_t>(num_tasks));
    pool.parallel_for(num_tasks,
                      [&](std::int64_t task, int) { ++num_runs[static_cast<std::size_t>(task)]; });
    EXPECT_EQ(num_runs, std::vector<int>(static_cast<std::size_t>(num_tasks), 1));
  }
}

TEST_P(ThreadPoolTest, ThreadIndexIsExclusive) {
  ThreadPool pool(GetParam());
  std::vector<std::int64_t> num_tasks_of_thread(static_cast<std::size_t>(GetParam()));
  pool.parallel_for(2000, [&](std::int64_t, int thread_idx) {
    ASSERT_GE(thread_idx, 0);
    ASSERT_LT(thread_idx, GetParam());
    ++num_tasks_of_thread[static_cast<std::size_t>(thread_idx)];
  });
  std::int64_t total = 0;
  for (const std::int64_t count : num_tasks_of_thread) total += count;
  EXPECT_EQ(total, 2000);
}

TEST_P(ThreadPoolTest, ManyShortLoopsSeeEachOthersWrites) {
  ThreadPool pool(GetParam());
  std::vector<int> values(4, 0);
  for (int loop = 0; loop < 3000; ++loop) {
    pool.parallel_for(4, [&](std::int64_t task, int) { ++values[static_cast<std::size_t>(task)]; });
  }
  EXPECT_EQ(values, std::vector<int>(4, 3000));
}

TEST_P(ThreadPoolTest, RethrowsOnTheCallerAndStaysUsable) {
  ThreadPool pool(GetParam());
  for (int loop = 0; loop < 50; ++loop) {
    try {
      pool.parallel_for(100, [&](std::int64_t task, int) {
        if (task == 17) throw std::runtime_error("task 17");
      });
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "task 17");
    }
    std::atomic<int> num_runs{0};
    pool.parallel_for(10, [&](std::int64_t, int) { ++num_runs; });
    EXPECT_EQ(num_runs, 10);
  }
}

TEST_P(ThreadPoolTest, DropsTasksAfterAnException) {
  ThreadPool pool(GetParam());
  std::atomic<std::int64_t> num_runs{0};
  EXPECT_THROW(pool.parallel_for(1'000'000,
                                 [&](std::int64_t, int) {
                                   ++num_runs;
                                   throw std::runtime_error("first");
                                 }),
               std::runtime_error);
  EXPECT_LT(num_runs, 1'000'000);
}

TEST_P(ThreadPoolTest, RefusesANestedLoop) {
  ThreadPool pool(GetParam());
  try {
    pool.parallel_for(1,
                      [&](std::int64_t, int) { pool.parallel_for(1, [](std::int64_t, int) {}); });
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
  }
}

TEST(ThreadPool, OneThreadRunsInOrderOnTheCaller) {
  ThreadPool pool(1);
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<std::int64_t> order;
  pool.parallel_for(5, [&](std::int64_t task, int thread_idx) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(thread_idx, 0);
    order.push_back(task);
  });
  EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
}

TEST(ThreadPool, WorkersReallyTakePart) {
  // Both tasks wait for each other: one thread alone would never finish.
  ThreadPool pool(2);
  std::atomic<int> num_begun{0};
  pool.parallel_for(2, [&](std::int64_t, int) {
    ++num_begun;
    while (num_begun < 2) std::this_thread::yield();
  });
  EXPECT_EQ(num_begun, 2);
}

TEST(ThreadPool, RefusesNoThreads) {
  try {
    const ThreadPool pool(0);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("num_threads is 0"), std::string::npos);
  }
}

TEST(ThreadPool, EndsWithoutALoop) { const ThreadPool pool(4); }

}  // namespace
}  // namespace megamoe::cpu
