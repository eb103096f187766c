// What layers take of a device's memory, and that they give it back.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <array>

#include "gpu/layer_device.h"
#include "layer/workspace.h"

namespace megamoe::verify {
namespace {

using cuda::check;

/// The device hands memory out in pages of 2 MiB.
constexpr double kPage = 2 << 20;

double free_bytes(int device) {
  const cuda::CurrentDevice current(device);
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<double>(free);
}

TEST(CudaHeaps, ComeAndGoWithoutALeak) {
  const LayerConfig config = cuda_config(spec_with_tokens({24}));
  double before = 0.0;
  for (int i = 0; i < 10; ++i) {
    const auto threads = make_thread_communicators(1);
    const auto group = make_cuda_communicator(*threads[0], 0);
    for (int heap = 0; heap < 20; ++heap) {
      Workspace workspace(config, *group);
      const MoeLayer layer(config, *group, workspace);
    }
    if (i == 0) before = free_bytes(0);
  }
  EXPECT_EQ(free_bytes(0), before);
}

/// NCCL takes memory for itself with a communicator's first windows, and keeps it. From then on
/// nothing may go: neither 4 MB a heap nor 50 KB.
TEST(CudaHeaps, OfTwoRanksComeAndGoWithoutALeak) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  constexpr int kHeaps = 100;
  const LayerConfig config = cuda_config(spec_with_tokens({24, 24}));
  std::array<double, 2> lost{};
  run_ranks(2, [&](Communicator& threads) {
    const auto group = make_cuda_communicator(threads, threads.rank());
    double before = 0.0;
    for (int heap = 0; heap < 2 * kHeaps; ++heap) {
      if (heap == kHeaps) {
        group->barrier("the peer has let go of this rank's heaps", 60);
        before = free_bytes(threads.rank());
      }
      Workspace workspace(config, *group);
      const MoeLayer layer(config, *group, workspace);
    }
    group->barrier("the last heaps have gone", 60);
    lost[threads.rank()] = before - free_bytes(threads.rank());
    group->barrier("both ranks have looked", 60);
  });
  for (int device = 0; device < 2; ++device) {
    RecordProperty("lost_of_device_" + std::to_string(device), std::to_string(lost[device]));
    EXPECT_LT(lost[device], 2 * kPage) << "of device " << device << " in " << kHeaps << " heaps";
  }
}

TEST(CudaHeaps, OfCommunicatorsOfTwoRanksComeAndGoWithoutALeak) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  const LayerConfig config = cuda_config(spec_with_tokens({24, 24}));
  std::array<double, 2> before{};
  constexpr int kWarmUps = 2, kCommunicators = 8;
  for (int i = 0; i < kWarmUps + kCommunicators; ++i) {
    if (i == kWarmUps) before = {free_bytes(0), free_bytes(1)};
    run_ranks(2, [&](Communicator& threads) {
      const auto group = make_cuda_communicator(threads, threads.rank());
      for (int heap = 0; heap < 5; ++heap) {
        Workspace workspace(config, *group);
        const MoeLayer layer(config, *group, workspace);
      }
      group->barrier("both ranks are done", 60);
    });
  }
  for (int device = 0; device < 2; ++device) {
    const double lost = before[device] - free_bytes(device);
    RecordProperty("lost_of_device_" + std::to_string(device), std::to_string(lost));
    EXPECT_LT(lost, 4 * kPage) << "of device " << device << " in " << kCommunicators
                               << " communicators";
  }
}

LayerConfig config_of_wide_rows(std::int64_t num_tokens, int num_ranks) {
  ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(num_ranks, num_tokens));
  spec.hidden_dim = spec.intermediate_dim = 1024;
  return cuda_config(spec);
}

TEST(CudaWorkspaceBytes, AreWhatIsAllocated) {
  const LayerConfig config = config_of_wide_rows(4096, 1);
  { const OneRank warm_up(config); }
  const double before = free_bytes(0);
  const OneRank rank(config);
  const double after = free_bytes(0);
  const auto stated = static_cast<double>(workspace_bytes(config, 1).total());
  EXPECT_EQ(rank.workspace.bytes().total(), workspace_bytes(config, 1).total());
  EXPECT_NEAR(before - after, stated, 3.0 * kPage);
}

/// What NCCL adds to a window, whatever it is, must not depend on its size: between a small and a
/// large workspace lies what workspace_bytes() says, and symmetric memory is as large as it says.
TEST(CudaWorkspaceBytes, OfTwoRanksWithADeviceEachAreWhatIsAllocated) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  constexpr std::array<std::int64_t, 2> kTokens = {1024, 12288};
  std::array<std::array<double, 2>, 2> taken{};  // [rank][size]
  run_ranks(2, [&](Communicator& threads) {
    const int device = threads.rank();
    const auto group = make_cuda_communicator(threads, device);
    const auto take = [&](std::int64_t num_tokens) {
      const LayerConfig config = config_of_wide_rows(num_tokens, 2);
      group->barrier("before a workspace", 60);
      const double before = free_bytes(device);
      Workspace workspace(config, *group);
      const double after = free_bytes(device);
      group->barrier("both have looked", 60);
      EXPECT_EQ(static_cast<std::int64_t>(workspace.impl().symmetric->bytes()),
                workspace_bytes(config, 2).symmetric);
      return before - after;
    };
    take(kTokens[1]);  // with what a communicator's first windows and kernels take
    for (int size = 0; size < 2; ++size) taken[device][size] = take(kTokens[size]);
  });
  std::array<double, 2> stated{};
  for (int size = 0; size < 2; ++size) {
    stated[size] =
        static_cast<double>(workspace_bytes(config_of_wide_rows(kTokens[size], 2), 2).total());
  }
  ASSERT_GT(stated[1] - stated[0], 100 * kPage);
  for (int rank = 0; rank < 2; ++rank) {
    for (int size = 0; size < 2; ++size) {
      RecordProperty("beyond_of_rank_" + std::to_string(rank) + "_size_" + std::to_string(size),
                     std::to_string(taken[rank][size] - stated[size]));
    }
    // Two allocations each, whose last pages are more or less full.
    EXPECT_NEAR(taken[rank][1] - taken[rank][0], stated[1] - stated[0], 3.0 * kPage)
        << "rank " << rank;
  }
}

}  // namespace
}  // namespace megamoe::verify
