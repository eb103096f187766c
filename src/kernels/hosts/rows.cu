// Rows into the buffers that travel between hosts, and out of them.
#include <algorithm>

#include "device/row_copy.cuh"
#include "kernels/exchange/rows.cuh"
#include "kernels/hosts/hosts.h"
#include "kernels/launch.h"

namespace megamoe::gpu {
namespace {

constexpr int kCopyThreads = 256;
constexpr unsigned kBlocksAnSm = 8;

struct CopyParams {
  RowCopy copy;
  std::int32_t words_a_row;
  std::int32_t threads_a_row;  ///< divides kCopyThreads
};

template <class Word>
__global__ __launch_bounds__(kCopyThreads) void copy_rows_kernel(const CopyParams params) {
  const RowCopy& copy = params.copy;
  const int rows_a_block = kCopyThreads / params.threads_a_row;
  const int first_word = static_cast<int>(threadIdx.x) % params.threads_a_row;
  std::int64_t row = std::int64_t{blockIdx.x} * rows_a_block +
                     static_cast<int>(threadIdx.x) / params.threads_a_row;
  for (; row < copy.num_rows; row += std::int64_t{gridDim.x} * rows_a_block) {
    const std::int64_t from_row = copy.from_rows == nullptr ? row : copy.from_rows[row];
    const std::int64_t to_row = copy.to_rows == nullptr ? row : copy.to_rows[row];
    const auto* from = reinterpret_cast<const Word*>(copy.from + from_row * copy.row_bytes);
    auto* to = reinterpret_cast<Word*>(copy.to + to_row * copy.row_bytes);
    for (int word = first_word; word < params.words_a_row; word += params.threads_a_row) {
      to[word] = from[word];
    }
  }
  device::fence_async_global();  // peers may pull rows through their copy engines
}

__global__ __launch_bounds__(kCopyThreads) void keep_ids_kernel(const HostRouting routing,
                                                                const std::int32_t host,
                                                                std::int32_t* ids,
                                                                const std::int64_t num_slots) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * kCopyThreads + threadIdx.x; i < num_slots;
       i += std::int64_t{gridDim.x} * kCopyThreads) {
    const std::int32_t id = ids[i];
    const bool stays =
        id >= 0 && id < routing.dims.num_experts && routing.host_of_expert(id) == host;
    if (!stays) ids[i] = -1;
  }
}

unsigned num_blocks(std::int64_t wanted) {
  return static_cast<unsigned>(
      std::min<std::int64_t>(wanted, std::int64_t{num_multiprocessors()} * kBlocksAnSm));
}

template <class Word>
void launch_copy(const RowCopy& copy, cudaStream_t stream) {
  CopyParams params{copy, static_cast<std::int32_t>(copy.row_bytes / sizeof(Word)), 1};
  while (params.threads_a_row < params.words_a_row && params.threads_a_row < kCopyThreads) {
    params.threads_a_row *= 2;
  }
  const std::int64_t rows_a_block = kCopyThreads / params.threads_a_row;
  copy_rows_kernel<Word>
      <<<num_blocks((copy.num_rows + rows_a_block - 1) / rows_a_block), kCopyThreads, 0, stream>>>(
          params);
  check_launch("copy_rows");
}

}  // namespace

void copy_rows(const RowCopy& copy, cudaStream_t stream) {
  if (copy.num_rows == 0) return;
  // Buffers start at multiples of 16 bytes.
  if (copy.row_bytes % static_cast<std::int64_t>(sizeof(Vector)) == 0) {
    launch_copy<Vector>(copy, stream);
  } else {
    launch_copy<std::uint32_t>(copy, stream);
  }
}

void keep_ids_of_host(const HostRouting& routing, std::int32_t host, std::int32_t* ids,
                      std::int64_t num_slots, cudaStream_t stream) {
  if (num_slots == 0) return;
  keep_ids_kernel<<<num_blocks((num_slots + kCopyThreads - 1) / kCopyThreads), kCopyThreads, 0,
                    stream>>>(routing, host, ids, num_slots);
  check_launch("keep_ids_of_host");
}

void load_rows_of_hosts_kernels() {
  load_kernel(reinterpret_cast<const void*>(&copy_rows_kernel<Vector>));
  load_kernel(reinterpret_cast<const void*>(&copy_rows_kernel<std::uint32_t>));
  load_kernel(reinterpret_cast<const void*>(&keep_ids_kernel));
}

}  // namespace megamoe::gpu
