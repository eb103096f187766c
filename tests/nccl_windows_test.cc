// Symmetric memory in NCCL's windows: who is named where a rank fails in NCCL alone or does not
// come, and what becomes of the memory. Needs no device: NCCL and CUDA do what each test says; the
// ranks, two threads, are the library's.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/cuda/lsa_pointers.h"
#include "comm/cuda/window_heap.h"
#include "comm/peer_watch.h"
#include "layer/agreement.h"
#include "megamoe/communicator.h"
#include "scripted_nccl.h"

namespace megamoe::nccl {

/// Where a window of a rank that does not reach its peer has the peer's part.
const std::byte kOutOfReach{};
/// Which of the two ranks does not.
std::atomic<int> rank_out_of_reach = -1;

/// The window's own memory for every rank.
std::vector<std::byte*> lsa_pointers(ncclWindow_t window, int num_ranks) {
  std::vector<std::byte*> pointers;
  for (int rank = 0; rank < num_ranks; ++rank) {
    pointers.push_back(rank == rank_out_of_reach ? const_cast<std::byte*>(&kOutOfReach)
                                                 : reinterpret_cast<std::byte*>(window) + rank);
  }
  return pointers;
}

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// A rank that is joined with its peer.
struct Joined {
  Joined(Communicator& communicator, double deadline_s)
      : group(communicator),
        watch(communicator, has_left_R),
        windows(std::make_shared<WindowGroup>(ncclUniqueId{}, communicator, std::vector<int>{5, 7},
                                              has_left_R, deadline_s)) {}

  std::unique_ptr<WindowHeap> heap(double deadline_s) {
    return std::make_unique<WindowHeap>(windows, group, 1000, deadline_s);
  }

  Communicator& group;
  std::uint32_t has_left_R[2] = {0, 0};
  PeerWatch watch;
  std::shared_ptr<WindowGroup> windows;
};

class NcclWindows : public testing::Test {
 protected:
  /// What each of two ranks throws. None waits for long.
  static std::vector<std::optional<Error>> run(
      const std::function<void(Communicator&)>& rank_main) {
    const auto start = Clock::now();
    auto communicators = make_thread_communicators(2);
    std::vector<std::optional<Error>> errors(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          rank_main(*communicators[rank]);
        } catch (const Error& error) {
          errors[rank] = error;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_LT(Clock::now() - start, 10s);
    return errors;
  }
  static void expect(const std::optional<Error>& error, ErrorCode code,
                     const std::vector<std::string>& texts) {
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code(), code) << error->what();
    for (const std::string& text : texts) {
      EXPECT_NE(std::string(error->what()).find(text), std::string::npos)
          << "'" << text << "' is not in: " << error->what();
    }
  }

  scripted::Nccl& nccl_ = scripted::fresh_nccl();
};

TEST_F(NcclWindows, HoldTheHeapsOfARankAndItsPeer) {
  const auto errors = run([&](Communicator& group) {
    Joined joined(group, 20.0);
    const auto heap = joined.heap(20.0);
    const int peer = 1 - group.rank();
    EXPECT_EQ(nccl_.ranks[group.rank()].num_windows, 1);
    EXPECT_EQ(heap->peer(peer) - peer, heap->peer(group.rank()));
    group.barrier("the end", 20.0);
  });
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_FALSE(errors[rank].has_value()) << errors[rank]->what();
    EXPECT_EQ(nccl_.ranks[rank].num_windows, 0);
    EXPECT_EQ(nccl_.ranks[rank].num_destroyed, 1);
    EXPECT_EQ(nccl_.ranks[rank].num_aborted, 0);
  }
  EXPECT_EQ(nccl_.num_allocations, 0);
}

TEST_F(NcclWindows, ARankThatFailsInNcclAloneIsNamedWithItsReason) {
  nccl_.ranks[0].registers_for_ever = true;
  nccl_.ranks[1].registering = ncclUnhandledCudaError;
  const auto errors = run([&](Communicator& group) { Joined(group, 20.0).heap(20.0); });
  expect(errors[0], ErrorCode::peer_failed,
         {"rank 0 waited for a symmetric window of rank 1 on this host, which left",
          "rank 1 has left (NCCL gave no symmetric window", "its last words"});
  expect(errors[1], ErrorCode::unsupported,
         {"NCCL gave no symmetric window of 1000 bytes to rank 1 (device 7) and rank 0 (device 5)",
          "an error of the script (its last words)", "cuMem", "nvidia-smi topo -p2p rw",
          "overlap on and off", "different hosts"});
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(nccl_.ranks[rank].num_aborted, 1);
  EXPECT_EQ(nccl_.num_allocations, 0);
}

/// As NCCL does on a machine where only some devices have peer access.
TEST_F(NcclWindows, ARankWhoseMemoryIsNotMappedIsNamedWithItsDeviceOnAll) {
  scripted::cuda().unmapped = &kOutOfReach;
  rank_out_of_reach = 1;
  const auto errors = run([&](Communicator& group) { Joined(group, 20.0).heap(20.0); });
  rank_out_of_reach = -1;
  const std::string message =
      "rank 0 (device 5) cannot load and store in the memory of rank 1 (device 7)";
  expect(errors[0], ErrorCode::unsupported,
         {message, "nvidia-smi topo -p2p rw", "overlap on and off", "different hosts"});
  expect(errors[1], ErrorCode::unsupported, {"rank 0: " + message, "different hosts"});
  EXPECT_EQ(nccl_.num_allocations, 0);
}

TEST_F(NcclWindows, ARankThatDiesInNcclIsNamed) {
  nccl_.ranks[0].registers_for_ever = true;
  const auto errors = run([&](Communicator& group) {
    Joined joined(group, 20.0);
    if (group.rank() == 0) {
      joined.heap(20.0);
    } else {
      // As far as its memory, which the ranks agree on.
      const LocalOutcome outcome;
      agree(group, outcome, "the allocation of a symmetric heap", 20.0);
      group.abort("its end");
    }
  });
  expect(errors[0], ErrorCode::peer_failed,
         {"a symmetric window of rank 1 on this host, which left: rank 1 has left (its end)"});
}

/// NCCL may still write to the window's memory, and kernels read other windows.
TEST_F(NcclWindows, AWindowThatIsNotMadeInTimeIsAnErrorAndItsMemoryStaysUntilTheGroupEnds) {
  const auto errors = run([&](Communicator& group) {
    Joined joined(group, 20.0);
    const auto first = joined.heap(20.0);
    group.barrier("the first heap", 20.0);
    if (group.rank() == 0) nccl_.ranks[0].registers_for_ever = true;
    try {
      joined.heap(group.rank() == 0 ? 0.5 : 20.0);
    } catch (const Error&) {
      if (group.rank() == 0) EXPECT_EQ(nccl_.ranks[0].num_aborted, 0);
      throw;
    }
  });
  expect(errors[0], ErrorCode::deadline_exceeded,
         {"rank 0 waited 0.5", "s for a symmetric window of rank 1 on this host"});
  expect(errors[1], ErrorCode::peer_failed, {"rank 0 has left (rank 0 waited 0.5"});
  EXPECT_EQ(nccl_.ranks[0].num_aborted, 1);
  EXPECT_EQ(nccl_.ranks[0].num_windows, 1);  // as NCCL is at work
  EXPECT_EQ(nccl_.ranks[1].num_windows, 0);
  EXPECT_GE(nccl_.num_allocations_at_abort, 1);
  EXPECT_EQ(nccl_.num_allocations, 0);
}

TEST_F(NcclWindows, ARankThatLeavesWhileTheGroupFormsIsNamed) {
  nccl_.ranks[0].state = ncclInProgress;
  const auto errors = run([&](Communicator& group) {
    if (group.rank() == 1) group.abort("its end");
    if (group.rank() == 0) Joined(group, 20.0);
  });
  expect(errors[0], ErrorCode::peer_failed, {"rank 1 on this host, which left"});
  EXPECT_EQ(nccl_.ranks[0].num_aborted, 1);
}

TEST_F(NcclWindows, ARankThatDoesNotComeToTheGroupIsNamedAtTheDeadline) {
  nccl_.ranks[0].state = ncclInProgress;
  const auto errors = run([&](Communicator& group) {
    if (group.rank() == 0) Joined(group, 0.3);
  });
  expect(errors[0], ErrorCode::deadline_exceeded, {"rank 0 waited 0.3", "of rank 1 on this host"});
}

}  // namespace
}  // namespace megamoe::nccl
