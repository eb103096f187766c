// What ranks that share a GPU rely on, asked of CUDA itself: their kernels wait for each other, so
// none of their streams may wait for another, and nothing that a call does on the host may wait
// for kernels.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "cuda/runtime.h"
#include "device/flags.cuh"
#include "gpu/gpu_test.h"

namespace megamoe::testing {
namespace {

using cuda::check;
using cuda::DeviceMemory;
using cuda::OwnedStream;

// Before the process first uses CUDA, as ranks that share a device need it (docs/cuda.md).
[[maybe_unused]] const int kEnvironment =
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0) + setenv("CUDA_MODULE_LOADING", "EAGER", 0);

constexpr std::uint64_t kDeadline_ns = 300'000'000;

/// Waits until all of `num_kernels` run; counts those that waited in vain.
__global__ void meet(std::uint32_t* arrived, std::uint32_t num_kernels, std::uint32_t* missed) {
  device::signal<device::Reach::gpu>(arrived);
  const std::uint64_t start = device::now_ns();
  while (device::acquire<device::Reach::gpu>(arrived) < num_kernels) {
    if (device::now_ns() - start > kDeadline_ns) {
      atomicAdd(missed, 1U);
      return;
    }
  }
}

class SharedDevice : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped()) words_ = DeviceMemory(0, 2 * sizeof(std::uint32_t), "two counters");
  }

  [[nodiscard]] std::uint32_t* words() const {
    return reinterpret_cast<std::uint32_t*>(words_.data());
  }
  void clear() const {
    check(cudaMemset(words(), 0, 2 * sizeof(std::uint32_t)), "counters");
    check(cudaDeviceSynchronize(), "counters");
  }
  /// A kernel on each stream; the number of those that did not run beside all others.
  [[nodiscard]] std::uint32_t num_that_waited(const std::vector<cudaStream_t>& streams) const {
    clear();
    for (const cudaStream_t stream : streams) {
      meet<<<1, 1, 0, stream>>>(words(), static_cast<std::uint32_t>(streams.size()), words() + 1);
    }
    check(cudaDeviceSynchronize(), "kernels that meet");
    std::uint32_t missed = 0;
    check(cudaMemcpy(&missed, words() + 1, sizeof missed, cudaMemcpyDeviceToHost), "counters");
    return missed;
  }

  DeviceMemory words_;
};

cudaStream_t new_stream(bool is_beside) {
  int least = 0;
  int greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, is_beside ? greatest : 0),
        "a stream");
  return stream;
}

void destroy(std::vector<cudaStream_t>& streams) {
  for (const cudaStream_t stream : streams) check(cudaStreamDestroy(stream), "a stream");
  streams.clear();
}

/// Eight ranks have a stream and a side stream each, and make another one for a moment.
TEST_F(SharedDevice, StreamsOfEightRanksNeverShareAQueue) {
  constexpr int kRounds = 40;
  std::mt19937 engine(1);
  int num_failed = 0;
  for (int round = 0; round < kRounds && num_failed < 5; ++round) {
    std::vector<cudaStream_t> before;  // of layers that came before; none in a process that begins
    const auto num_before = round == 0 ? 0 : static_cast<int>(engine() % 48);
    for (int i = 0; i < num_before; ++i) before.push_back(new_stream(engine() % 3 == 0));
    std::shuffle(before.begin(), before.end(), engine);
    destroy(before);
    std::vector<cudaStream_t> live;
    for (int rank = 0; rank < 8; ++rank) {
      live.push_back(new_stream(false));
      live.push_back(new_stream(true));
      std::vector<cudaStream_t> for_a_moment = {new_stream(false)};
      destroy(for_a_moment);
    }
    const std::uint32_t waited = num_that_waited(live);
    num_failed += waited != 0 ? 1 : 0;
    EXPECT_EQ(waited, 0U) << "round " << round << ", after " << num_before << " streams";
    destroy(live);
  }
}

/// A call allocates its context where none is free, and uploads what a test gives it.
TEST_F(SharedDevice, NothingThatACallDoesOnTheHostWaitsForAKernel) {
  const OwnedStream busy;
  const OwnedStream other;
  std::vector<std::byte> host(8 << 20);
  const DeviceMemory device(0, static_cast<std::int64_t>(host.size()), "a copy");
  std::vector<DeviceMemory> kept;
  std::vector<cudaStream_t> streams;
  const auto allocate = [&](std::int64_t bytes) { kept.emplace_back(0, bytes, "a context"); };
  void* pooled = nullptr;
  const std::vector<std::pair<const char*, std::function<void()>>> works = {
      {"cudaMalloc of 1 KiB", [&] { allocate(1 << 10); }},
      {"cudaMalloc of 64 MiB", [&] { allocate(64 << 20); }},
      {"cudaMalloc of 4 GiB", [&] { allocate(std::int64_t{4} << 30); }},
      {"cudaMallocAsync",
       [&] { check(cudaMallocAsync(&pooled, 64 << 20, other.get()), "cudaMallocAsync"); }},
      {"cudaFreeAsync", [&] { check(cudaFreeAsync(pooled, other.get()), "cudaFreeAsync"); }},
      {"a new stream", [&] { streams.push_back(new_stream(true)); }},
      {"a launch on another stream", [&] { meet<<<1, 1, 0, other.get()>>>(words(), 0, words()); }},
      {"an upload on another stream",
       [&] {
         check(cudaMemcpyAsync(device.data(), host.data(), host.size(), cudaMemcpyHostToDevice,
                               other.get()),
               "upload");
         check(cudaStreamSynchronize(other.get()), "upload");
       }},
      {"a download on another stream",
       [&] {
         check(cudaMemcpyAsync(host.data(), device.data(), host.size(), cudaMemcpyDeviceToHost,
                               other.get()),
               "download");
         check(cudaStreamSynchronize(other.get()), "download");
       }},
  };
  for (const auto& [name, work] : works) {
    clear();
    const std::uint32_t no_such_number = 1000;
    meet<<<1, 1, 0, busy.get()>>>(words(), no_such_number, words() + 1);
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    EXPECT_EQ(cudaStreamQuery(busy.get()), cudaErrorNotReady) << name << " waits for a kernel";
    EXPECT_LT(taken.count(), 150.0) << name;
    check(cudaDeviceSynchronize(), name);
  }
  destroy(streams);
}

}  // namespace
}  // namespace megamoe::testing
