// Ranks that share a GPU enqueue waits behind what they wait for.
#include "comm/enqueue_order.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace megamoe {
namespace {

using Meeting = EnqueueOrder::Meeting;
constexpr EnqueueOrder::Seconds kLong{60.0};
const auto kHopeful = [](int /*rank*/) { return false; };

/// What ranks enqueue into one hardware queue: the device works through it from its front.
class Queue {
 public:
  struct Launch {
    std::uint64_t point;
    bool waits;  ///< for all ranks' announcements of the point; else it is one
  };
  void push(Launch launch) {
    const std::lock_guard lock(mutex_);
    launches_.push_back(launch);
  }
  [[nodiscard]] const std::vector<Launch>& launches() const { return launches_; }

 private:
  std::mutex mutex_;
  std::vector<Launch> launches_;
};

TEST(EnqueueOrder, OneQueueServesAllRanks) {
  constexpr int kRanks = 5;
  constexpr std::uint64_t kNumPoints = 400;
  EnqueueOrder order(kRanks);
  Queue queue;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      std::mt19937 random(rank);
      for (std::uint64_t point = 1; point <= kNumPoints; ++point) {
        if (random() % 8 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 99));
        queue.push({point, false});
        order.reach(rank, point);
        ASSERT_EQ(order.await(point, kLong, kHopeful), Meeting::complete);
        queue.push({point, true});
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  std::vector<int> announced(kNumPoints + 1, 0);
  for (const Queue::Launch& launch : queue.launches()) {
    if (launch.waits) {
      ASSERT_EQ(announced[launch.point], kRanks) << "point " << launch.point;
    } else {
      ++announced[launch.point];
    }
  }
}

TEST(EnqueueOrder, ARankThatEndedItsCallKeepsNobodyWaiting) {
  EnqueueOrder order(3);
  order.reach(0, 6);
  order.reach(1, 9);  // it refused the call
  std::thread late([&] { order.reach(2, 6); });
  EXPECT_EQ(order.await(6, kLong, kHopeful), Meeting::complete);
  late.join();
  order.reach(1, 7);  // points do not shrink
  order.reach(0, 9);
  order.reach(2, 9);
  EXPECT_EQ(order.await(9, kLong, kHopeful), Meeting::complete);
}

TEST(EnqueueOrder, PatienceEndsAndSoDoesHope) {
  EnqueueOrder order(2);
  order.reach(0, 1);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(order.await(1, EnqueueOrder::Seconds(0.05), kHopeful), Meeting::late);
  EXPECT_EQ(order.await(1, kLong, [](int rank) { return rank == 1; }), Meeting::hopeless);
  EXPECT_LT(std::chrono::steady_clock::now() - start, EnqueueOrder::Seconds(30.0));
}

TEST(EnqueueOrder, ARankThatHasArrivedMayLeave) {
  EnqueueOrder order(3);
  order.reach(0, 1);
  order.reach(1, 1);
  const auto first_two_have_left = [](int rank) { return rank < 2; };
  EXPECT_EQ(order.await(1, EnqueueOrder::Seconds(0.05), first_two_have_left), Meeting::late);
}

TEST(EnqueueOrder, AskingWhetherThereIsHopeKeepsNoRankFromArriving) {
  EnqueueOrder order(2);
  order.reach(0, 1);
  const auto peer_arrives = [&](int rank) {
    order.reach(rank, 1);
    return true;  // it has left since
  };
  EXPECT_EQ(order.await(1, kLong, peer_arrives), Meeting::complete);
}

}  // namespace
}  // namespace megamoe
