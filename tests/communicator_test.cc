// Ranks as threads: collectives, failures of peers, deadlines.
#include "megamoe/communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "megamoe/error.h"

namespace megamoe {
namespace {

constexpr double kDeadline = 30.0;

template <class Work>
Error error_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::internal, "no error was thrown"};
}

TEST(ThreadCommunicator, GathersInRankOrderManyTimes) {
  run_ranks(5, [](Communicator& group) {
    for (int round = 0; round < 300; ++round) {
      const int mine = 1000 * round + group.rank();
      std::vector<int> all(group.size(), -1);
      group.all_gather(&mine, all.data(), sizeof(int), "test", kDeadline);
      for (int rank = 0; rank < group.size(); ++rank) EXPECT_EQ(all[rank], 1000 * round + rank);
    }
  });
}

TEST(ThreadCommunicator, SumsInRankOrderWithEqualBitsEverywhere) {
  const int num_ranks = 4;
  std::vector<std::vector<float>> results(num_ranks);
  run_ranks(num_ranks, [&](Communicator& group) {
    std::vector<float> values(1003);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = 0.1F * static_cast<float>(i % 17) + 1e7F * static_cast<float>(group.rank() == 2);
    }
    group.all_reduce_sum(values.data(), values.size(), "test", kDeadline);
    results[group.rank()] = values;
  });
  for (int rank = 1; rank < num_ranks; ++rank) EXPECT_EQ(results[rank], results[0]);
  const float term = 0.1F * 3.0F;
  EXPECT_EQ(results[0][3], ((term + term) + (term + 1e7F)) + term);
}

TEST(ThreadCommunicator, HeapsReachPeersAndStartZeroed) {
  run_ranks(3, [](Communicator& group) {
    for (int round = 0; round < 200; ++round) {
      const auto heap = group.allocate_symmetric(64, kDeadline);
      EXPECT_EQ(heap->bytes(), 64U);
      const int next = (group.rank() + 1) % group.size();
      EXPECT_EQ(heap->peer(group.rank())[5], std::byte{0});
      group.barrier("reads", kDeadline);
      heap->peer(next)[5] = static_cast<std::byte>(group.rank() + 1);
      group.barrier("writes", kDeadline);
      const int previous = (group.rank() + group.size() - 1) % group.size();
      EXPECT_EQ(heap->peer(group.rank())[5], static_cast<std::byte>(previous + 1));
      group.barrier("checks", kDeadline);
    }
  });
}

TEST(ThreadCommunicator, AHeapThatDoesNotFitIsAnErrorOnEveryRank) {
  run_ranks(2, [](Communicator& group) {
    const Error error =
        error_of([&] { group.allocate_symmetric(std::size_t{1} << 62, kDeadline); });
    EXPECT_EQ(error.code(), ErrorCode::out_of_memory);
    EXPECT_NE(std::string(error.what()).find("rank 0"), std::string::npos) << error.what();
    EXPECT_NE(group.allocate_symmetric(16, kDeadline), nullptr);  // the group is still usable
  });
}

TEST(ThreadCommunicator, RanksInDifferentCallsLearnWhereEachIs) {
  run_ranks(3, [](Communicator& group) {
    std::vector<int> data(300);
    const auto expect_mismatch = [&](auto usual, auto different, const char* usual_text,
                                     const char* different_text) {
      const Error error = error_of([&] {
        if (group.rank() == 2) {
          different();
        } else {
          usual();
        }
      });
      EXPECT_EQ(error.code(), ErrorCode::config_mismatch);
      const std::string text = error.what();
      EXPECT_NE(text.find("rank 0 is at " + std::string(usual_text)), std::string::npos) << text;
      EXPECT_NE(text.find("rank 2 at " + std::string(different_text)), std::string::npos) << text;
      group.barrier("the group is still usable", kDeadline);
    };
    const auto barrier = [&](const char* what) {
      return [&group, what] { group.barrier(what, kDeadline); };
    };
    const auto gather = [&](std::size_t bytes) {
      return [&group, &data, bytes] {
        group.all_gather(data.data() + 200, data.data(), bytes, "a gather", kDeadline);
      };
    };
    const auto sum = [&] {
      group.all_reduce_sum(std::vector<float>(6).data(), 6, "a sum", kDeadline);
    };
    const auto heap = [&](std::size_t bytes) {
      return [&group, bytes] { group.allocate_symmetric(bytes, kDeadline); };
    };
    expect_mismatch(barrier("step 7"), barrier("step 8"), "step 7", "step 8");
    expect_mismatch(gather(8), gather(24), "a gather (a gather of 8", "a gather (a gather of 24");
    expect_mismatch(gather(24), sum, "a gather", "a sum");
    expect_mismatch(heap(64), heap(128), "the allocation of a symmetric heap of 64",
                    "the allocation of a symmetric heap of 128");
    expect_mismatch(barrier("step 9"), heap(64), "step 9", "the allocation");
    expect_mismatch(heap(64), gather(24), "the allocation", "a gather");
  });
}

TEST(ThreadCommunicator, ARankThatThrowsFailsItsPeersAtOnceByName) {
  const auto start = std::chrono::steady_clock::now();
  std::atomic<int> num_named{0};
  const Error error = error_of([&] {
    run_ranks(4, [&](Communicator& group) {
      if (group.rank() == 2) throw Error(ErrorCode::invalid_argument, "bad input of rank two");
      const Error seen = error_of([&] { group.barrier("the test", kDeadline); });
      EXPECT_EQ(seen.code(), ErrorCode::peer_failed);
      const std::string text = seen.what();
      if (text.find("rank 2") != std::string::npos &&
          text.find("bad input of rank two") != std::string::npos) {
        ++num_named;
      }
    });
  });
  EXPECT_EQ(num_named, 3);
  EXPECT_STREQ(error.what(), "bad input of rank two");
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(ThreadCommunicator, ARankThatReturnsEarlyIsNamed) {
  run_ranks(2, [](Communicator& group) {
    if (group.rank() == 0) return;
    const Error error = error_of([&] { group.barrier("more work", kDeadline); });
    EXPECT_EQ(error.code(), ErrorCode::peer_failed);
    EXPECT_NE(std::string(error.what()).find("rank 0"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("more work"), std::string::npos) << error.what();
  });
}

TEST(ThreadCommunicator, AMissedDeadlineNamesTheMissingRankAndBreaksTheGroup) {
  std::atomic<bool> done{false};
  run_ranks(3, [&](Communicator& group) {
    if (group.rank() == 1) {
      while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const Error late = error_of([&] { group.barrier("too late", kDeadline); });
      EXPECT_EQ(late.code(), ErrorCode::deadline_exceeded);
      return;
    }
    const Error error = error_of([&] { group.barrier("a slow peer", 0.3); });
    EXPECT_EQ(error.code(), ErrorCode::deadline_exceeded);
    const std::string text = error.what();
    EXPECT_NE(text.find("a slow peer"), std::string::npos) << text;
    EXPECT_NE(text.find("missing: rank 1"), std::string::npos) << text;
    done = true;
  });
}

TEST(ThreadCommunicator, NoRanksIsRefused) {
  EXPECT_EQ(error_of([] { make_thread_communicators(0); }).code(), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace megamoe
