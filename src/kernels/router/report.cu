// What was wrong with what a call refused. One thread, and a read of one word where nothing was.
#include "kernels/launch.h"
#include "kernels/router/load.cuh"

namespace megamoe::gpu {
namespace {

__device__ RouterFailure fault_of_token(const RouterConfig& config, const RouterReads& reads,
                                        std::int64_t token) {
  for (int j = 0; j < static_cast<int>(config.num_experts); ++j) {
    const float logit = logit_at(reads, token, j);
    if (!is_finite(logit)) return {0, RouterFault::logit_not_finite, token, j, logit};
  }
  for (int k = 0; reads.ids_TK.data != nullptr && k < reads.num_slots; ++k) {
    const int id = reads.ids_TK.row(token)[k];
    if (id < -1 || id >= static_cast<int>(config.num_experts)) {
      return {0, RouterFault::id_out_of_range, token, k, static_cast<double>(id)};
    }
  }
  return {0, RouterFault::row_refused, token, 0, 0.0};
}

__device__ RouterFailure fault_of_call(const RouterConfig& config, const RouterReads& reads) {
  const int num_experts = static_cast<int>(config.num_experts);
  for (int j = 0; reads.selection_bias_E != nullptr && j < num_experts; ++j) {
    const float bias = reads.selection_bias_E[j];
    if (!is_finite(bias)) return {0, RouterFault::bias_not_finite, -1, j, bias};
  }
  if (reads.load != nullptr) {
    for (int i = 0; i < 2 * num_experts + 1; ++i) {
      if (!is_load_value(reads.load[i])) {
        return {0, RouterFault::load_is_no_sum, -1, i, reads.load[i]};
      }
    }
    const double tokens = reads.load[2 * num_experts];
    if (tokens < static_cast<double>(reads.num_tokens)) {
      return {0, RouterFault::load_too_small, reads.num_tokens, 2 * num_experts, tokens};
    }
  }
  return {0, RouterFault::d_aux_not_finite, -1, 0,
          reads.d_aux_loss == nullptr ? 0.0 : *reads.d_aux_loss};
}

__global__ void report_kernel(const RouterConfig config, const RouterReads reads,
                              const RouterScratch scratch, RouterFailure* failure) {
  const unsigned long long refused = *scratch.refused;
  if (refused == kNothingRefused) return;
  *scratch.refused = kNothingRefused;
  volatile RouterFailure* record = failure;
  if (record->is_set != 0) return;
  const RouterFailure found =
      refused == kCallRefused ? fault_of_call(config, reads)
                              : fault_of_token(config, reads, static_cast<std::int64_t>(refused));
  record->fault = found.fault;
  record->token = found.token;
  record->index = found.index;
  record->value = found.value;
  __threadfence_system();
  record->is_set = 1;
}

}  // namespace

void load_forward_router_kernels();
void load_backward_router_kernels();
void load_balance_router_kernels();

void report_refused(const RouterConfig& config, const RouterReads& reads,
                    const RouterScratch& scratch, RouterFailure* failure, cudaStream_t stream) {
  report_kernel<<<1, 1, 0, stream>>>(config, reads, scratch, failure);
  check_launch("report_refused");
}

void load_router_kernels() {
  load_forward_router_kernels();
  load_backward_router_kernels();
  load_balance_router_kernels();
  load_kernel(reinterpret_cast<const void*>(&report_kernel));
}

}  // namespace megamoe::gpu
