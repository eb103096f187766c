// The watch that tells kernels who has left.
#include "comm/peer_watch.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <csignal>
#include <thread>

#include "process_fixture.h"

namespace megamoe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kDeadline = 30.0;
constexpr std::chrono::milliseconds kSomeLooks{350};

/// Words that a watch writes. Kernels read them; here an atomic does.
class Words {
 public:
  [[nodiscard]] std::uint32_t* data() { return words_.data(); }
  [[nodiscard]] bool has_left(int rank) {
    return std::atomic_ref(words_[rank]).load(std::memory_order_acquire) != 0;
  }
  /// Whether it happens within 5 s.
  [[nodiscard]] bool leaves(int rank) {
    const Clock::time_point start = Clock::now();
    while (!has_left(rank) && Clock::now() - start < std::chrono::seconds(5)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return has_left(rank);
  }

 private:
  std::array<std::uint32_t, 4> words_{};
};

TEST(PeerWatch, SetsTheWordsOfThoseThatHaveLeftAndNoOther) {
  auto ranks = make_thread_communicators(4);
  Words words;
  PeerWatch watch(*ranks[0], words.data());
  std::this_thread::sleep_for(kSomeLooks);
  for (const int rank : {0, 1, 2, 3}) EXPECT_FALSE(words.has_left(rank)) << rank;
  ranks[2].reset();
  EXPECT_TRUE(words.leaves(2));
  ranks[1]->abort("disk full");
  EXPECT_TRUE(words.leaves(1));
  std::this_thread::sleep_for(kSomeLooks);
  for (const int rank : {0, 3}) EXPECT_FALSE(words.has_left(rank)) << rank;
}

TEST(PeerWatch, SeesAKilledProcessWhileItsOwnRankIsElsewhere) {
  const auto statuses = run_processes(3, [](const std::string& name, int rank) {
    const auto group = make_process_communicator(name, rank, 3, kDeadline);
    if (rank == 1) raise(SIGKILL);
    Words words;
    const PeerWatch watch(*group, words.data());
    expect(words.leaves(1), "rank 1 has left");
    // The first to see it leaves because of it; the last still names the cause.
    if (rank == 2) std::this_thread::sleep_for(kSomeLooks);
    const Error error = error_of([&] { group->barrier("the end", kDeadline); });
    expect(contains(error, "rank 1 has left (its process has ended"), error.what());
  });
  EXPECT_TRUE(WIFSIGNALED(statuses[1]));
  EXPECT_EQ(statuses[0], 0);
  EXPECT_EQ(statuses[2], 0);
}

TEST(PeerWatch, StopsAtOnceAndTwice) {
  auto ranks = make_thread_communicators(2);
  Words words;
  const Clock::time_point start = Clock::now();
  for (int repeat = 0; repeat < 100; ++repeat) {
    PeerWatch watch(*ranks[0], words.data());
    if (repeat % 2 == 0) watch.stop();
  }
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));  // a hundredth of 100 looks' pauses
  PeerWatch watch(*ranks[0], words.data());
  watch.stop();
  ranks[1].reset();
  std::this_thread::sleep_for(kSomeLooks);
  EXPECT_FALSE(words.has_left(1));
}

// As of a data loader's workers: what they destroy, or leave, is a copy.
TEST(PeerWatch, AForkedChildIsNotTheRank) {
  expect_all_succeed(run_processes(2, [](const std::string& name, int rank) {
    auto group = make_process_communicator(name, rank, 2, kDeadline);
    Words words;
    auto watch = std::make_unique<PeerWatch>(*group, words.data());
    expect_child_ends([&] {
      watch.reset();
      group.reset();
    });
    group->barrier("both children have ended", kDeadline);
    expect(group->departures().empty(), "nobody has left");
    std::this_thread::sleep_for(kSomeLooks);
    expect(!words.has_left(1 - rank), "nobody has left");
    group->barrier("the end", kDeadline);
  }));
}

}  // namespace
}  // namespace megamoe
