// The device primitives that the products do not exercise: counters with deadlines, and bulk copies
// of rows. Barriers, tensor tiles, multicast, wgmma and register reallocation are what every
// product is made of: products_test.cu.
#include <gtest/gtest.h>

#include <cstring>

#include "device/barrier.cuh"
#include "device/flags.cuh"
#include "device/row_copy.cuh"
#include "device/tensor_map.h"
#include "device/tensor_map_cache.h"
#include "device_buffers.cuh"
#include "gpu_test.h"
#include "megamoe/error.h"

namespace megamoe::testing {
namespace {

class Device : public GpuTest {};

constexpr int kRowBytes = 4096;
constexpr int kNumCopies = 3;

// Block 0 pulls each row once and stores it to several places, then signals; block 1 waits for the
// signal and checks what arrived.
__global__ void scatter_rows(const std::uint8_t* source, std::uint8_t* copies, int num_rows,
                             std::uint32_t* arrived, unsigned long long* num_wrong,
                             device::DeadlineReport* report) {
  __shared__ __align__(128) std::uint8_t row_bytes[kRowBytes];
  __shared__ std::uint64_t row_arrived;
  const std::int64_t copy_bytes = std::int64_t{num_rows} * kRowBytes;
  if (blockIdx.x == 0) {
    if (threadIdx.x != 0) return;
    const std::uint32_t barrier = device::shared_address(&row_arrived);
    const std::uint32_t row = device::shared_address(row_bytes);
    device::init_barrier(barrier, 1);
    device::publish_barrier_init();
    for (int i = 0; i < num_rows; ++i) {
      device::arrive_expecting(barrier, kRowBytes);
      device::load_bytes(row, source + std::int64_t{i} * kRowBytes, kRowBytes, barrier);
      device::wait(barrier, i & 1);
      for (int copy = 0; copy < kNumCopies; ++copy) {
        device::store_bytes(copies + copy * copy_bytes + std::int64_t{i} * kRowBytes, row,
                            kRowBytes);
      }
      device::commit_stores();
      device::wait_stores_complete<0>();
      device::signal<device::Reach::gpu>(arrived);
    }
  } else {
    __shared__ bool in_time;
    for (int i = 0; i < num_rows; ++i) {
      if (threadIdx.x == 0) {
        in_time = device::wait_for<device::Reach::gpu>(arrived, i + 1, 5'000'000'000, {0, 0, 1, i},
                                                       report);
      }
      __syncthreads();
      if (!in_time) return;
      for (int copy = 0; copy < kNumCopies; ++copy) {
        for (int byte = static_cast<int>(threadIdx.x); byte < kRowBytes;
             byte += static_cast<int>(blockDim.x)) {
          const std::int64_t at = std::int64_t{i} * kRowBytes + byte;
          if (copies[copy * copy_bytes + at] != source[at]) atomicAdd(num_wrong, 1ULL);
        }
      }
      __syncthreads();
    }
  }
}

TEST_F(Device, RowsArePulledOnceAndStoredManyTimes) {
  constexpr int kRows = 50;
  DeviceBuffer<bf16> source(kRows * kRowBytes / 2);
  fill_random(source, 3, 1.0F);
  DeviceBuffer<std::uint8_t> copies(std::int64_t{kNumCopies} * kRows * kRowBytes);
  copies.poison();
  DeviceBuffer<std::uint32_t> arrived(1);
  DeviceBuffer<unsigned long long> num_wrong(1);
  DeviceBuffer<device::DeadlineReport> report(1);
  check_cuda(cudaMemset(arrived.data(), 0, 4), "memset");
  check_cuda(cudaMemset(num_wrong.data(), 0, 8), "memset");
  check_cuda(cudaMemset(report.data(), 0, sizeof(device::DeadlineReport)), "memset");
  scatter_rows<<<2, 128>>>(reinterpret_cast<const std::uint8_t*>(source.data()), copies.data(),
                           kRows, arrived.data(), num_wrong.data(), report.data());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(report.download()[0].set, 0U);
  EXPECT_EQ(num_wrong.download()[0], 0ULL);
}

__global__ void wait_in_vain(const std::uint32_t* counter, device::DeadlineReport* report) {
  device::wait_for<device::Reach::system>(counter, 7, 20'000'000, {2, 5, 11, 13}, report);
}

TEST_F(Device, AMissedDeadlineReportsWhatWasAwaited) {
  DeviceBuffer<std::uint32_t> counter(1);
  check_cuda(cudaMemset(counter.data(), 0, 4), "memset");
  device::DeadlineReport* report = nullptr;
  ASSERT_EQ(cudaMallocHost(&report, sizeof(device::DeadlineReport)), cudaSuccess);
  *report = {};
  wait_in_vain<<<1, 1>>>(counter.data(), report);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(report->set, 1U);
  EXPECT_EQ(report->awaited.rank, 2);
  EXPECT_EQ(report->awaited.peer, 5);
  EXPECT_EQ(report->awaited.what, 11);
  EXPECT_EQ(report->awaited.block, 13);
  EXPECT_EQ(report->expected, 7U);
  EXPECT_EQ(report->seen, 0U);
  cudaFreeHost(report);
}

TEST_F(Device, TensorMapsRefuseWhatTheCopyEngineCannotRead) {
  DeviceBuffer<bf16> buffer(64 * 65);
  device::TileDescription tile{buffer.data() + 1, DType::bf16, 2};
  tile.sizes = {64, 64};
  tile.stride_bytes = {2, 128};
  tile.box = {64, 8};
  EXPECT_THROW(device::encode_tensor_map(tile, "x"), Error);
  tile.data = buffer.data();
  tile.stride_bytes = {2, 130};
  EXPECT_THROW(device::encode_tensor_map(tile, "x"), Error);
  tile.stride_bytes = {2, 128};
  EXPECT_NO_THROW(device::encode_tensor_map(tile, "x"));
}

TEST_F(Device, CachedTensorMapsAreThoseThatWouldBeEncoded) {
  DeviceBuffer<bf16> buffer(64 * 128);
  device::TileDescription tile{buffer.data(), DType::bf16, 2};
  tile.sizes = {64, 64};
  tile.stride_bytes = {2, 128};
  tile.box = {64, 8};
  device::TensorMapCache cache;
  const auto expect_right = [&](std::size_t size) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      const CUtensorMap cached = cache.encode(tile, "x");
      const CUtensorMap wanted = device::encode_tensor_map(tile, "x");
      EXPECT_EQ(std::memcmp(&cached, &wanted, sizeof(wanted)), 0);
      EXPECT_EQ(cache.size(), size);
    }
  };
  // Descriptions that differ in one number each.
  expect_right(1);
  tile.box[1] = 16;
  expect_right(2);
  tile.sizes[1] = 32;
  expect_right(3);
  tile.stride_bytes[1] = 256;
  expect_right(4);
  tile.data = buffer.data() + 64;
  expect_right(5);
  // What cannot be encoded is not kept, and a full cache starts anew.
  tile.stride_bytes[1] = 130;
  EXPECT_THROW(cache.encode(tile, "x"), Error);
  EXPECT_EQ(cache.size(), 5U);
  tile.stride_bytes[1] = 256;
  for (std::int64_t rows = 1; rows <= std::int64_t{device::TensorMapCache::kMaxMaps}; ++rows) {
    tile.sizes[1] = rows;
    cache.encode(tile, "x");
    EXPECT_LE(cache.size(), device::TensorMapCache::kMaxMaps);
  }
}

}  // namespace
}  // namespace megamoe::testing
