// The router on the device, from logits to their gradient. Host interface; runs on `stream`.
//
// Selection, weights and gradients are those of routing/router_*.h. exp is the device's and sums
// over experts are trees, so scores may differ from the CPU's in the last places, and ids where
// scores are that close. Equal logits are equal scores: ties go to the lower id on both. Every sum
// has a fixed order, so the bits of two runs are equal.
//
// Legend: T tokens, E experts, K slots.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megamoe/router.h"

namespace megamoe::gpu {

/// Rows of a matrix; the stride is in elements.
template <class T>
struct RowsOf {
  T* data = nullptr;
  std::int64_t stride = 0;

  [[nodiscard]] MEGAMOE_HOST_DEVICE T* row(std::int64_t index) const {
    return data + index * stride;
  }
};

/// Everything that a call reads; null what it does not.
struct RouterReads {
  std::int64_t num_tokens = 0;
  std::int32_t num_slots = 0;
  DType logit_dtype = DType::fp32;  ///< or bf16
  const void* logits_TE = nullptr;
  std::int64_t logit_stride = 0;
  RowsOf<const std::int32_t> ids_TK;  ///< of a forward: forced ids, or null
  RowsOf<const float> d_weights_TK;
  const float* selection_bias_E = nullptr;  ///< or null
  const double* load = nullptr;             ///< [2E + 1], global; null: no auxiliary loss
  const float* d_aux_loss = nullptr;        ///< null: 1
};

enum class RouterFault : std::uint32_t {
  none,
  row_refused,       ///< token: what was wrong in it is gone (ids overwritten in place)
  logit_not_finite,  ///< token, index: expert, value
  id_out_of_range,   ///< token, index: slot, value
  bias_not_finite,   ///< index: expert, value
  load_is_no_sum,    ///< index into the load, value
  load_too_small,    ///< token: tokens of the call, value: tokens of the load
  d_aux_not_finite   ///< value
};

/// The first fault since the host last cleared it; lies in pinned host memory.
struct RouterFailure {
  std::uint32_t is_set;  ///< written last
  RouterFault fault;
  std::int64_t token;
  std::int32_t index;
  double value;
};

/// What kernels keep between the launches of a call, device memory: the lowest token that was
/// refused; all experts' sums by block.
struct RouterScratch {
  unsigned long long* refused = nullptr;  ///< kNothingRefused between calls
  double* load_sums = nullptr;            ///< [kMaxLoadBlocks, 2E]
};
inline constexpr unsigned long long kNothingRefused = ~0ULL;
inline constexpr unsigned long long kCallRefused = ~0ULL - 1;  ///< a tensor that all tokens share
inline constexpr int kMaxLoadBlocks = 128;

/// Nothing runs in any of these when there are no tokens. Refused tokens: see RouterScratch.
void route(const RouterConfig& config, const RouterReads& reads, RowsOf<std::int32_t> ids_TK,
           RowsOf<float> weights_TK, const RouterScratch& scratch, cudaStream_t stream);
void route_backward(const RouterConfig& config, const RouterReads& reads, RowsOf<float> d_logits_TE,
                    const RouterScratch& scratch, cudaStream_t stream);
void add_load(const RouterConfig& config, const RouterReads& reads, double* load,
              const RouterScratch& scratch, cudaStream_t stream);

/// Of reads.load.
void aux_loss(const RouterConfig& config, const RouterReads& reads, float* loss,
              const RouterScratch& scratch, cudaStream_t stream);
void update_bias(const RouterConfig& config, const RouterReads& reads, float rate, float* bias_E,
                 const RouterScratch& scratch, cudaStream_t stream);

/// The last launch of a call: where something was refused, finds out what, in what the call has
/// read, and records it unless the record holds an earlier fault.
void report_refused(const RouterConfig& config, const RouterReads& reads,
                    const RouterScratch& scratch, RouterFailure* failure, cudaStream_t stream);

/// Loads the code of all of these; a capture must not.
void load_router_kernels();

}  // namespace megamoe::gpu
