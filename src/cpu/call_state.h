// What the CPU backend keeps from a forward call to its backward call.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "comm/workspace_layout.h"
#include "layer/call_context.h"

namespace megamoe::cpu {

struct CpuCallState final : CallState {
  CpuCallState(const WorkspaceDims& dims, int num_hosts, std::int64_t saved_capacity, bool gated)
      : ids_TK(dims.max_tokens * dims.routing.top_k),
        weights_TK(ids_TK.size()),
        counts_RE(static_cast<std::size_t>(dims.routing.num_ranks) * dims.routing.num_experts),
        crossing_RS(static_cast<std::size_t>(dims.routing.num_ranks) * num_hosts),
        expert_begin(dims.routing.experts_per_rank() + 1),
        rows_e(dims.routing.experts_per_rank()),
        saved_row_capacity(saved_capacity) {
    // Pages that no call reaches are never touched.
    const std::size_t saved_elements = saved_capacity * dims.intermediate_dim;
    if (gated) saved_g = std::make_unique_for_overwrite<bf16[]>(saved_elements);
    saved_u = std::make_unique_for_overwrite<bf16[]>(saved_elements);
  }

  [[nodiscard]] const std::int64_t* rows_per_expert() const override { return rows_e.data(); }
  [[nodiscard]] std::int64_t num_rows() const override { return expert_begin.back(); }

  std::int64_t call_number = -1;  ///< equal on all ranks; says which forward call this was
  std::int64_t num_tokens = 0;
  std::vector<std::int32_t> ids_TK;
  std::vector<float> weights_TK;
  std::vector<std::int32_t> counts_RE;
  std::vector<std::int32_t> crossing_RS;   ///< tokens of each rank that each host needs
  std::vector<std::int64_t> expert_begin;  ///< first row of each local expert, then the end
  std::vector<std::int64_t> rows_e;
  std::int64_t saved_row_capacity;  ///< rows before it have g and u below
  std::unique_ptr<bf16[]> saved_g;
  std::unique_ptr<bf16[]> saved_u;
};

}  // namespace megamoe::cpu
