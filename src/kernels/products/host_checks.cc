#include "kernels/products/host_checks.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "kernels/launch.h"
#include "kernels/products/tile_shape.h"
#include "megamoe/error.h"

namespace megamoe::products {
namespace {

constexpr std::int64_t kChannelMultiple = 64;

[[noreturn]] void refuse(const char* name, const std::string& reason) {
  throw Error(ErrorCode::invalid_argument, std::string(name) + ": " + reason);
}

void check_columns(const ConstTensorView& view, std::int64_t num_columns, const char* name) {
  if (view.dtype != DType::bf16) refuse(name, "must be bf16, is " + describe(view));
  if (num_columns % kChannelMultiple != 0) {
    refuse(name, "hidden and intermediate sizes must be multiples of 64, got " +
                     std::to_string(num_columns));
  }
  if (view.strides[view.num_dims - 1] != 1)
    refuse(name, "columns must be contiguous, is " + describe(view));
}

/// How many of the kernel's clusters of four the current device runs at once: each lies within one
/// GPC, whose SMs may be no multiple of four (30 of 132 SMs on an H200 that was measured).
int most_clusters(const void* kernel, cudaLaunchConfig_t config, int cluster_size) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> most;
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard lock(mutex);
  if (const auto known = most.find({device, kernel}); known != most.end()) return known->second;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(cluster_size), 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count = 0;
  cuda::check(cudaOccupancyMaxActiveClusters(&count, kernel, &config), "clusters that run at once");
  return most[{device, kernel}] = count;
}

}  // namespace

void check_groups(const GroupedRows& rows, const char* product) {
  if (rows.num_groups < 1 || rows.num_groups > kMaxGroups) {
    refuse(product, "number of experts must be in [1, " + std::to_string(kMaxGroups) + "], got " +
                        std::to_string(rows.num_groups));
  }
  if (rows.begin == nullptr || rows.count == nullptr) refuse(product, "row groups are absent");
}

void check_rows(const ConstTensorView& view, std::int64_t num_rows, std::int64_t num_columns,
                const char* name) {
  if (view.num_dims != 2 || view.sizes[0] != num_rows || view.sizes[1] != num_columns) {
    refuse(name, "must be [" + std::to_string(num_rows) + ", " + std::to_string(num_columns) +
                     "], is " + describe(view));
  }
  check_columns(view, num_columns, name);
}

void check_weights(const ConstTensorView& view, std::int64_t num_experts, std::int64_t num_rows,
                   std::int64_t num_columns, const char* name) {
  if (view.num_dims != 3 || view.sizes[0] != num_experts || view.sizes[1] != num_rows ||
      view.sizes[2] != num_columns) {
    refuse(name, "must be [" + std::to_string(num_experts) + ", " + std::to_string(num_rows) +
                     ", " + std::to_string(num_columns) + "], is " + describe(view));
  }
  check_columns(view, num_columns, name);
}

void check_absent(const ConstTensorView& view, const Activation& activation, const char* name) {
  if (view.absent()) return;
  refuse(name, "must be absent for an activation without a gate (" +
                   std::string(to_string(activation.kind)) + "), is " + describe(view));
}

void launch_clusters(const void* kernel, std::initializer_list<void*> params,
                     const LaunchOptions& options, std::size_t shared_bytes, int cluster_size) {
  int num_sms = gpu::num_multiprocessors();
  // CTAs beyond those that fit at once would find little to do, one wave late.
  if (options.num_sms != 0) num_sms = std::min(num_sms, options.num_sms);
  if (num_sms < kClusterSize)
    refuse("num_sms", "must be at least 2, got " + std::to_string(num_sms));
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shared_bytes)),
              "dynamic shared memory of a product kernel");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_sms / cluster_size * cluster_size));
  config.blockDim = dim3(kNumThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = options.stream;
  if (cluster_size > kClusterSize) {
    const int most = most_clusters(kernel, config, cluster_size);
    config.gridDim.x = std::min(config.gridDim.x, static_cast<unsigned>(most * cluster_size));
  }
  cuda::check(cudaLaunchKernelExC(&config, kernel, const_cast<void**>(params.begin())),
              "launch of a product kernel");
}

}  // namespace megamoe::products
