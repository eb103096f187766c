// What the CUDA backend keeps from a forward call to its backward call.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "comm/gpu_workspace_layout.h"
#include "cuda/runtime.h"
#include "layer/call_context.h"

namespace megamoe::cuda {

struct CudaCallState final : CallState {
  /// `saved_rows` rows of g and u.
  CudaCallState(int device_idx, const WorkspaceDims& dims, std::int64_t saved_rows, bool gated)
      : device(device_idx),
        num_experts(dims.routing.experts_per_rank()),
        layout(call_plan_layout(dims)),
        plan(device_idx, layout.bytes, "the plan of a call"),
        saved_g(device_idx, gated ? saved_rows * dims.intermediate_dim * 2 : 0, "saved g"),
        saved_u(device_idx, saved_rows * dims.intermediate_dim * 2, "saved u") {}

  /// Both wait for the stream of the forward call, once.
  [[nodiscard]] const std::int64_t* rows_per_expert() const override {
    if (!rows_known) {
      const CurrentDevice current(device);
      std::vector<std::int32_t> counts(num_experts);
      check(cudaMemcpyAsync(counts.data(), layout.group_count_e.in(plan.data()),
                            counts.size() * sizeof(counts[0]), cudaMemcpyDeviceToHost, stream),
            "reading the rows of a call");
      check(cudaStreamSynchronize(stream), "reading the rows of a call");
      rows_e.assign(counts.begin(), counts.end());
      rows_known = true;
    }
    return rows_e.data();
  }
  [[nodiscard]] std::int64_t num_rows() const override {
    const std::int64_t* rows = rows_per_expert();
    return std::accumulate(rows, rows + num_experts, std::int64_t{0});
  }

  int device;
  std::int32_t num_experts;
  CallPlanLayout layout;
  DeviceMemory plan;
  DeviceMemory saved_g;
  DeviceMemory saved_u;
  std::int64_t num_tokens = 0;
  cudaStream_t stream = nullptr;  ///< of the forward call
  // On several hosts, where the host knows them: everybody's slots of each expert, and tokens that
  // cross to each host by the first group of experts that needs them.
  std::vector<std::int32_t> counts_RE;
  std::vector<std::int32_t> crossing_RSG;
  std::int64_t call_number = 0;
  mutable bool rows_known = false;
  mutable std::vector<std::int64_t> rows_e;
};

}  // namespace megamoe::cuda
