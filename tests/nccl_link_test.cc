// What joins hosts by NCCL: whom it names where NCCL fails, where a peer leaves and where one does
// not come. Needs no device: NCCL and CUDA do what each test says.
#include "comm/cuda/nccl_link.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "megamoe/error.h"
#include "scripted_nccl.h"

namespace megamoe::nccl {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// The first rank of two hosts, whose peer is rank 1.
class NcclLinkTest : public testing::Test {
 protected:
  NcclLinkTest() : nccl_(scripted::fresh_nccl()), rank_(nccl_.ranks[0]) {}

  std::unique_ptr<NcclLink> link(double deadline_s = 20.0) {
    return std::make_unique<NcclLink>(ncclUniqueId{}, even_topology(2, 1), /*rank=*/0,
                                      /*max_ctas=*/8, has_left_R_, deadline_s);
  }
  void peer_leaves() { std::atomic_ref(has_left_R_[1]).store(1); }

  /// What it throws, after how long.
  static Error error_of(const std::function<void()>& work) {
    try {
      work();
    } catch (const Error& error) {
      return error;
    }
    return {ErrorCode::internal, "no error"};
  }
  Error error_of_exchange(NcclLink& link, double deadline_s = 20.0) {
    const cuda::HostMessage message{1, nullptr, 1};
    return error_of([&] {
      link.exchange({&message, 1}, {&message, 1}, "results", deadline_s, nullptr);
    });
  }
  /// One that is not over; its events are recorded in this order: may begin, is over.
  void begin_transfer(NcclLink& link, double deadline_s = 20.0) {
    scripted::cuda().stream_is_done = false;
    const cuda::HostMessage message{1, nullptr, 1};
    link.exchange({&message, 1}, {&message, 1}, "results", deadline_s, nullptr);
  }
  /// Of a transfer that is under way: what the link's own thread finds.
  static Error awaited_failure(NcclLink& link) {
    const Clock::time_point start = Clock::now();
    while (Clock::now() - start < 10s) {
      if (const std::optional<Error> failure = link.failure()) return *failure;
      std::this_thread::sleep_for(1ms);
    }
    return {ErrorCode::internal, "no failure"};
  }
  static void expect(const Error& error, ErrorCode code, const std::vector<std::string>& texts) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& text : texts) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
          << "'" << text << "' is not in: " << error.what();
    }
  }

  scripted::Nccl& nccl_;
  scripted::Rank& rank_;
  std::uint32_t has_left_R_[2] = {0, 0};
};

TEST_F(NcclLinkTest, APeerThatLeavesWhileItFormsIsNamedAtOnce) {
  rank_.state = ncclInProgress;
  peer_leaves();
  const auto start = Clock::now();
  expect(error_of([&] { link(); }), ErrorCode::peer_failed, {"of rank 1 by network, which left"});
  EXPECT_LT(Clock::now() - start, 10s);
  EXPECT_EQ(rank_.num_aborted, 1);
}

TEST_F(NcclLinkTest, APeerThatDoesNotComeIsNamedAtTheDeadline) {
  rank_.state = ncclInProgress;
  expect(error_of([&] { link(0.5); }), ErrorCode::deadline_exceeded,
         {"rank 0 waited 0.5", "of rank 1 by network"});
  EXPECT_EQ(rank_.num_aborted, 1);
}

TEST_F(NcclLinkTest, APeerThatLeavesBeforeItsFirstMessageIsNamed) {
  scripted::cuda().stream_is_done = false;
  peer_leaves();
  expect(error_of([&] { link(); }), ErrorCode::peer_failed,
         {"the first message of rank 1 by network, which left"});
  EXPECT_EQ(rank_.num_aborted, 1);
}

TEST_F(NcclLinkTest, ARankThatFailsAloneLeavesNothingBehind) {
  scripted::cuda().has_memory = false;
  expect(error_of([&] { link(); }), ErrorCode::out_of_memory, {"greetings of hosts"});
  EXPECT_EQ(rank_.num_destroyed, 1);
}

/// NCCL's connection to a process that dies may end before the group's, which names it.
TEST_F(NcclLinkTest, APeerThatNcclLosesBeforeItIsKnownToHaveLeftIsNamed) {
  const auto joined = link();
  rank_.state = rank_.sending = ncclRemoteError;
  std::thread death([&] {
    std::this_thread::sleep_for(200ms);
    peer_leaves();
  });
  const Error error = error_of_exchange(*joined);
  death.join();
  expect(error, ErrorCode::peer_failed, {"rank 0 ", "rank 1, which left", "results", "its last"});
  EXPECT_EQ(rank_.num_aborted, 1);
  EXPECT_EQ(*joined->is_over(), 1U);
}

TEST_F(NcclLinkTest, APeerThatNcclLosesInATransferIsNamed) {
  const auto joined = link();
  begin_transfer(*joined);
  rank_.state = ncclRemoteError;
  std::this_thread::sleep_for(200ms);
  EXPECT_FALSE(joined->failure().has_value());
  peer_leaves();
  expect(awaited_failure(*joined), ErrorCode::peer_failed,
         {"rank 0 ", "rank 1, which left", "results", "its last words"});
  EXPECT_EQ(rank_.num_aborted, 1);
}

TEST_F(NcclLinkTest, AFailureOfNcclIsToldWhereNobodyLeaves) {
  const auto joined = link();
  rank_.state = rank_.sending = ncclRemoteError;
  const auto start = Clock::now();
  expect(error_of_exchange(*joined), ErrorCode::peer_failed,
         {"results of rank 1 by network", "an error of the script (its last words)",
          "none of them is known to have left"});
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST_F(NcclLinkTest, NobodyIsWaitedForLongerThanTheDeadline) {
  const auto joined = link();
  rank_.state = rank_.sending = ncclRemoteError;
  const auto start = Clock::now();
  expect(error_of_exchange(*joined, 0.1), ErrorCode::peer_failed, {"results of rank 1"});
  EXPECT_LT(Clock::now() - start, 800ms);
}

TEST_F(NcclLinkTest, WhatHasArrivedIsTakenFromAPeerThatNcclHasLost) {
  const auto joined = link();
  scripted::cuda().num_events_done = 2;
  begin_transfer(*joined);
  rank_.state = ncclRemoteError;
  peer_leaves();
  std::this_thread::sleep_for(200ms);
  EXPECT_FALSE(joined->failure().has_value());
}

/// What this rank does first may take its time, and what its peer has sent is there until then.
TEST_F(NcclLinkTest, ATransferThatMayNotBeginWaitsForIt) {
  const auto joined = link();
  begin_transfer(*joined);
  peer_leaves();
  std::this_thread::sleep_for(1500ms);
  EXPECT_FALSE(joined->failure().has_value());
  scripted::cuda().num_events_done = 1;
  const auto start = Clock::now();
  expect(awaited_failure(*joined), ErrorCode::peer_failed,
         {"rank 0 waited for results of rank 1 by network, which left"});
  EXPECT_LT(Clock::now() - start, 10s);
}

TEST_F(NcclLinkTest, ATransferThatDoesNotEndIsOverAtTheDeadline) {
  const auto joined = link();
  scripted::cuda().num_events_done = 1;
  begin_transfer(*joined, 0.1);
  expect(awaited_failure(*joined), ErrorCode::deadline_exceeded,
         {"rank 0 waited 0.1", "s for results of rank 1 by network; the deadline has passed"});
  EXPECT_EQ(rank_.num_aborted, 1);
  expect(error_of_exchange(*joined), ErrorCode::deadline_exceeded, {"the deadline has passed"});
}

}  // namespace
}  // namespace megamoe::nccl
