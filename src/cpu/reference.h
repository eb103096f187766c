// The layer's arithmetic on rows in expert order: what every backend must compute. The functions
// below are the stages of a call in order; between them rows travel (exchange.h).
#pragma once

#include <vector>

#include "cpu/buffers.h"
#include "cpu/call_state.h"
#include "cpu/thread_pool.h"
#include "cpu/thread_scratch.h"
#include "megamoe/layer.h"

namespace megamoe::cpu {

/// Rows are packed: nothing here works on tiles that must not cross an expert.
inline constexpr std::int64_t kRowAlignment = 1;

/// What all stages need to know.
struct StageContext {
  const WorkspaceDims& dims;
  const Activation& activation;
  const Buffers& buffers;
  ThreadPool& threads;
  std::vector<ThreadScratch>& scratch;
};

/// Forward. Fills a_CI from x_CH, and g and u of the rows that `state` saves.
void gate_up_products(const StageContext& stage, CpuCallState& state, const ExpertWeights& experts);
/// Forward. Sends each o row to its slot at the source.
void down_products(const StageContext& stage, const CpuCallState& state,
                   const ExpertWeights& experts);
/// Forward. y_t = sum over slots of w * o.
void reduce_outputs(const StageContext& stage, const CpuCallState& state, const TensorView& y);

/// Backward. Fills dg_CI, du_CI and a_CI (now w * a) from x_CH and dy_CH, and sends dw to the
/// source.
void p_products(const StageContext& stage, const CpuCallState& state, const ExpertWeights& experts);
/// Backward. Sends each dx row to its slot at the source.
void dx_products(const StageContext& stage, const CpuCallState& state,
                 const ExpertWeights& experts);
/// Backward. Writes, or adds into, the gradients of this rank's experts.
void weight_gradients(const StageContext& stage, const CpuCallState& state, WeightGradientMode mode,
                      const ExpertGradients& gradients);
/// Backward. dx_t = sum over slots; dweights, with exact zeros for empty slots.
void reduce_gradients(const StageContext& stage, const CpuCallState& state, const TensorView& dx,
                      const TensorView& dweights);

}  // namespace megamoe::cpu
