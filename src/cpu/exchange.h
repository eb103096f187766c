// How rows travel between thread ranks: a source stages, destinations fetch each token once and
// store it to every row that it fills. (Results need no step of their own: products store them to
// the source's slots.)
#pragma once

#include "cpu/reference.h"

namespace megamoe::cpu {

/// Copies this rank's rows, e.g. x, to where peers fetch them. `out_TH` is one of the staged
/// buffers.
void stage_rows(const StageContext& stage, const ConstTensorView& rows_TH, bf16* out_TH);
/// Publishes which rank fetches which token for which rows.
void stage_pull_lists(const StageContext& stage, const CpuCallState& state, PlanScratch& scratch);
/// Publishes the routing weights (backward).
void stage_weights(const StageContext& stage, const CpuCallState& state);

/// Forward: fetches x rows and their origins from all ranks.
void fetch_forward(const StageContext& stage);
/// Backward: fetches x and dy rows, weights and origins.
void fetch_backward(const StageContext& stage);

}  // namespace megamoe::cpu
