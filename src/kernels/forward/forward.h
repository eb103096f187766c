// Products under which rows travel: gate_up pulls its rows, down and dx push theirs. Host
// interface; everything runs on `options.stream`, without synchronisation, and can be captured in a
// graph. Bits equal those of the chain of kernels in exchange/exchange.h.
//
// The order of launches:
//   forward  stage_forward, [plan], meet(rows_staged), order_pulls, gate_up_and_pull,
//   down_and_push,
//            meet(results_sent), reduce_outputs
//   backward stage_backward, [plan], meet(rows_staged), order_pulls, gate_up_and_pull (again, for g
//            and u; dy follows x), gate_up_gradient, dx_and_push, push_dweights,
//            announce(gradients_sent), weight_gradients_beside_rows, meet(results_sent),
//            reduce_other_gradients
//   with g and u kept: gate_up_gradient_and_pull in place of gate_up_and_pull and
//            gate_up_gradient; x may be left to the weight gradients
//   gradients added into fp32: weight_gradients_beside_rows beside dx_and_push already, too
//
// Clusters of down_and_push and weight_gradients_beside_rows take tiles from counters that
// order_pulls() sets to zero: what it precedes is computed once.
//
// Two ranks that share a GPU split its SMs by `num_sms`; no kernel here waits for a peer's kernel,
// nor for a CTA of its own that has not started.
//
// Legend: C padded rows, H hidden, I intermediate, e experts.
#pragma once

#include <span>

#include "kernels/exchange/exchange.h"
#include "kernels/forward/pull_params.h"
#include "kernels/products/products.h"
#include "kernels/rank_view.h"
#include "kernels/reduce/reduce.h"

namespace megamoe::gpu {

struct GateUpTensors {
  ConstTensorView gate_eIH;  ///< absent, as g, where the activation has no gate
  ConstTensorView up_eIH;
  TensorView g_CI;  ///< absent unless g and u are saved
  TensorView u_CI;
  TensorView a_CI;
};

/// products::multiply_gate_up on the rows of the call, while the rows arrive. `rows` as given to
/// order_pulls(): x is pulled first, then, unless absent, dy, which is complete when the kernel
/// ends. Fails the call (rows_late) where rows do not arrive within the inner deadline.
void gate_up_and_pull(const RankView& view, std::byte* plan, const Activation& activation,
                      const PulledRows& rows, const GateUpTensors& tensors,
                      const products::LaunchOptions& options);

/// products::multiply_gate_up_gradient on `groups` of the call while its dy rows arrive; x follows
/// dy, or is left to weight_gradients_beside_rows() unless split_groups() has found rows that need
/// it before. What is pulled is complete, of all rows, when the kernel ends. For backward calls
/// that kept g and u: it takes the place of gate_up_and_pull.
void gate_up_gradient_and_pull(const RankView& view, const products::GroupedRows& groups,
                               const Activation& activation, const PulledRows& rows,
                               const ConstTensorView& down_eHI, const ConstTensorView& g_CI,
                               const ConstTensorView& u_CI,
                               const products::GateUpGradientOutputs& outputs, LastPass x_pass,
                               const products::LaunchOptions& options);

/// products::multiply_down, each row of o to its slot at the source, from where
/// meet(results_sent) publishes it.
void down_and_push(const RankView& view, std::byte* plan, const RowOrigin* origin_C,
                   const ConstTensorView& a_CI, const ConstTensorView& down_eHI,
                   const products::LaunchOptions& options);

/// products::multiply_dx, likewise.
void dx_and_push(const RankView& view, std::byte* plan, const RowOrigin* origin_C,
                 const ConstTensorView& dg_CI, const ConstTensorView& du_CI,
                 const ConstTensorView& gate_eIH, const ConstTensorView& up_eIH,
                 const products::LaunchOptions& options);

/// What of a backward call is left to do beside its weight gradients.
struct RowsBeside {
  /// To be pulled, as order_pulls() knows it, where gate_up_gradient_and_pull() has left it; null:
  /// x is there already.
  bf16* x_CH = nullptr;
  RowsOutput dx_TH;  ///< to be reduced as far as time allows
  DweightsOutput dweights_TK;
  std::int64_t num_tokens = 0;
  /// The first of the gradients, which do not read x: their tiles of all experts come before those
  /// of the others.
  int num_without_x = 1;
};

/// products::multiply_weight_gradients of all rows. A call may launch it several times, with the
/// same arguments but for SMs and stream: the launches share the tiles. Where tokens are to be
/// reduced, the last launch follows announce(gradients_sent). Tokens whose dx and dweights it has
/// not written are left to reduce_other_gradients(). Fails the call (rows_late) where x does not
/// arrive within the inner deadline; then the gradients that read it are not written.
void weight_gradients_beside_rows(const RankView& view, std::byte* plan,
                                  std::span<const products::WeightGradient> gradients,
                                  products::GradientMode mode, const RowsBeside& beside,
                                  const products::LaunchOptions& options);

/// Loads the kernels of this file; call once before the first call of a process, as
/// load_exchange_kernels().
void load_overlap_kernels();

}  // namespace megamoe::gpu
