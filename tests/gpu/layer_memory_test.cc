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

/// NCCL may take memory for itself with a communicator's first windows, and keep it. From then on
/// nothing may go: neither 4 MB a heap nor 20 KB.
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
    EXPECT_LT(lost[device], kPage) << "of device " << device << " in " << kHeaps << " heaps";
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
    EXPECT_LT(lost, kPage) << "of device " << device << " in " << kCommunicators
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

/// Of a small and of a large one, so that it shows whether NCCL's windows add to what is asked for.
TEST(CudaWorkspaceBytes, OfTwoRanksWithADeviceEachAreWhatIsAllocated) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  run_ranks(2, [](Communicator& threads) {
    const int device = threads.rank();
    const auto group = make_cuda_communicator(threads, device);
    const auto allocated = [&](const LayerConfig& config) {
      group->barrier("before a workspace", 60);
      const double before = free_bytes(device);
      const Workspace workspace(config, *group);
      const double after = free_bytes(device);
      group->barrier("both have looked", 60);
      EXPECT_EQ(static_cast<std::int64_t>(workspace.impl().symmetric->bytes()),
                workspace_bytes(config, 2).symmetric);
      return before - after;
    };
    allocated(config_of_wide_rows(12288, 2));  // and what first windows and kernels take
    for (const std::int64_t num_tokens : {1024, 12288}) {
      const LayerConfig config = config_of_wide_rows(num_tokens, 2);
      // Two allocations, whose last pages are more or less full.
      EXPECT_NEAR(allocated(config), static_cast<double>(workspace_bytes(config, 2).total()),
                  3.0 * kPage)
          << num_tokens << " tokens, rank " << device;
    }
  });
}

}  // namespace
}  // namespace megamoe::verify
