// Who has left, as any thread of a rank can see it.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "comm/departure.h"
#include "megamoe/communicator.h"
#include "process_fixture.h"

namespace megamoe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kDeadline = 30.0;

std::vector<int> ranks_of(const std::vector<Departure>& departures) {
  std::vector<int> ranks;
  for (const Departure& departure : departures) ranks.push_back(departure.rank);
  return ranks;
}

TEST(Departures, WordsAboutTheFirstThatLeftAreHandedOn) {
  EXPECT_EQ(first_cause_text(1, "disk full"), "rank 1 has left (disk full)");
  EXPECT_EQ(first_cause_text(1, "rank 12 has left (a (very) full disk) while rank 1 waited for x"),
            "rank 12 has left (a (very) full disk)");
  // Reasons of other kinds, and words that were cut off.
  EXPECT_EQ(first_cause_text(1, "rank 1 waited 3 s for y; missing: rank 2"),
            "rank 1 has left (rank 1 waited 3 s for y; missing: rank 2)");
  EXPECT_EQ(first_cause_text(1, "rank has left (it)"), "rank 1 has left (rank has left (it))");
  EXPECT_EQ(first_cause_text(1, "rank 7"), "rank 1 has left (rank 7)");
  EXPECT_EQ(first_cause_text(1, ""), "rank 1 has left ()");
  EXPECT_EQ(first_cause_text(1, "rank 2 has left (a long"), "rank 2 has left (a long");
}

TEST(Departures, OfThreadsAreInTheirOrderWithoutTheRankItself) {
  auto ranks = make_thread_communicators(4);
  EXPECT_TRUE(ranks[0]->departures().empty());
  ranks[3]->abort("disk full");
  ranks[1].reset();
  const auto departures = ranks[0]->departures();
  ASSERT_EQ(ranks_of(departures), (std::vector<int>{3, 1}));
  EXPECT_EQ(departures[0].error.code(), ErrorCode::peer_failed);
  EXPECT_STREQ(departures[0].error.what(), "rank 3 has left (disk full)");
  EXPECT_STREQ(departures[1].error.what(), "rank 1 has left (its communicator was destroyed)");
  EXPECT_EQ(ranks_of(ranks[3]->departures()), (std::vector<int>{1}));
  const Error error = error_of([&] { ranks[2]->throw_if_peer_left(); });
  EXPECT_TRUE(contains(error, "rank 3 has left (disk full)")) << error.what();
}

TEST(Departures, OfABrokenGroupAreAllOthers) {
  auto ranks = make_thread_communicators(3);
  const Error missed = error_of([&] { ranks[1]->barrier("the next step", 0.05); });
  EXPECT_EQ(missed.code(), ErrorCode::deadline_exceeded);
  const auto departures = ranks[2]->departures();
  ASSERT_EQ(ranks_of(departures), (std::vector<int>{0, 1}));
  for (const Departure& departure : departures) {
    EXPECT_EQ(departure.error.code(), ErrorCode::deadline_exceeded);
    EXPECT_TRUE(contains(departure.error, "the next step")) << departure.error.what();
  }
}

TEST(Departures, AProcessThatIsKilledComesBeforeOneThatLeavesBecauseOfIt) {
  const auto statuses = run_processes(3, [](const std::string& name, int rank) {
    const auto group = make_process_communicator(name, rank, 3, kDeadline);
    if (rank == 1) raise(SIGKILL);
    const Clock::time_point start = Clock::now();
    const auto wait_for = [&](std::size_t count) {
      while (group->departures().size() < count && Clock::now() - start < std::chrono::seconds(9)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    };
    if (rank == 2) return wait_for(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(350));
    wait_for(2);
    const auto departures = group->departures();
    expect(ranks_of(departures) == std::vector<int>{1, 2}, "two have left, in this order");
    for (const Departure& departure : departures) {
      expect(departure.error.code() == ErrorCode::peer_failed, departure.error.what());
    }
    expect(contains(departures[0].error, "its process has ended"), departures[0].error.what());
    expect(contains(departures[1].error, "was destroyed"), departures[1].error.what());
  });
  EXPECT_TRUE(WIFSIGNALED(statuses[1]));
  EXPECT_EQ(statuses[0], 0);
  EXPECT_EQ(statuses[2], 0);
}

// As of a data loader's workers: what they destroy, or leave, is a copy.
TEST(Departures, AForkedChildIsNotTheRank) {
  expect_all_succeed(run_processes(2, [](const std::string& name, int rank) {
    auto group = make_process_communicator(name, rank, 2, kDeadline);
    expect_child_ends([&] { group.reset(); });
    group->barrier("both children have ended", kDeadline);
    expect(group->departures().empty(), "nobody has left");
    group->barrier("the end", kDeadline);
  }));
}

}  // namespace
}  // namespace megamoe
