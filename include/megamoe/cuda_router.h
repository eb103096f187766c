// The router on a CUDA device: what Router computes, on device tensors and in stream order. Without
// CUDA types, and there also where the library was built without CUDA.
//
// It begins at logits and ends at their gradient: the products with the router's weight, before and
// after it, are the caller's (any dense library does them).
//
// Shapes: T tokens on this rank (may be 0), E experts of all ranks (at most 512), K slots a token
// (at most 16). At most 32 groups.
#pragma once

#include <cstdint>
#include <memory>

#include "megamoe/layer.h"
#include "megamoe/router.h"
#include "megamoe/tensor.h"

namespace megamoe {

/// What a backward reads. There is no context: scores and shares are computed again from logits and
/// ids, which must be those of the forward.
struct CudaRouterBackwardInputs {
  ConstTensorView logits;      ///< [T, E] fp32 or bf16, as forward() read them
  ConstTensorView expert_ids;  ///< [T, K] int32, as forward() wrote them
  ConstTensorView d_weights;   ///< [T, K] fp32; the values of empty slots are not read
  /// [2E + 1] fp64: the load summed over all ranks of the batch, this rank included. Required when
  /// aux_loss_alpha is not 0, ignored otherwise.
  ConstTensorView global_load;
  /// [1] fp32: derivative of the trained loss by the auxiliary loss; absent means 1. On the device,
  /// where autograd has it.
  ConstTensorView d_aux_loss;
};

/// Routes tokens on one device. Every tensor lies on that device; inner strides are 1, rows may be
/// further apart than their length. A call enqueues its kernels and returns: it never waits for the
/// device, allocates nothing, and can be captured in a CUDA graph (which holds pointers into the
/// router: keep it as long as the graph). Calls run in the order in which they were enqueued, also
/// from several streams; who replays graphs orders them himself. Use it from one thread at a time.
///
/// Results are those of Router: the same selection, ties to the lower id, within the roundings of
/// exp and of sums, whose order here is another one, but fixed: two runs give equal bits.
///
/// A load is a tensor [2E + 1] fp64 laid out as RouterLoad::values(): counts, score sums, number of
/// tokens. One sum all-reduce over the ranks makes it global.
///
/// Every method throws megamoe::Error as Router's do for what the host can see, memory that is not
/// the device's included. What only the device can see is reported: the next call and check() throw
/// it, and every call until check() has. It is, with its effect on the call that met it:
/// - a logit that is NaN or infinite (invalid_argument), an id outside [-1, E)
///   (expert_id_out_of_range): the token gets empty slots (id -1, weight 0), adds nothing to the
///   expert counts and score sums, and its row of d_logits is zeros; other tokens are not affected;
/// - a selection bias that is not finite (invalid_argument): all tokens get empty slots;
/// - a load that is no sum of loads or covers fewer tokens than the call, a d_aux_loss that is not
///   finite (invalid_argument): nothing is written.
class CudaRouter {
 public:
  /// Refuses what Router refuses as invalid_argument, more experts, slots or groups than the
  /// kernels take as unsupported, then a device that is not there or cannot run them. Allocates
  /// everything that it will ever need: at most 1 MiB.
  CudaRouter(const RouterConfig& config, int device);
  CudaRouter(CudaRouter&&) noexcept;
  CudaRouter& operator=(CudaRouter&&) noexcept;
  /// Waits for the calls that were enqueued.
  ~CudaRouter();

  [[nodiscard]] const RouterConfig& config() const;

  /// Writes ids and weights from `inputs.logits` (x and router_weight must be absent). forced_ids
  /// repeat a routing: the same logits and ids give the same weights, bit for bit. They may be the
  /// output's own ids.
  void forward(const RouterInputs& inputs, const RouterOutputs& outputs, Stream stream = {});

  /// Adds the tokens of a forward to `load`, [2E + 1] fp64.
  void add_load(const ConstTensorView& logits, const ConstTensorView& expert_ids,
                const TensorView& load, Stream stream = {});

  /// Writes Router::aux_loss() of `global_load`, [2E + 1] fp64, to `loss`, [1] fp32.
  void aux_loss(const ConstTensorView& global_load, const TensorView& loss, Stream stream = {});

  /// Stores d_logits, [T, E] fp32: the gradient through weights and, with f_j held constant,
  /// through the P_j of the auxiliary loss.
  void backward(const CudaRouterBackwardInputs& inputs, const TensorView& d_logits,
                Stream stream = {});

  /// `bias_j += rate * sign(mean load - load_j)`, as megamoe::update_selection_bias().
  /// `selection_bias` is [E] fp32.
  void update_selection_bias(const ConstTensorView& global_load, float rate,
                             const TensorView& selection_bias, Stream stream = {});

  /// Waits for the stream and for the calls that were enqueued on others, throws what the device
  /// has reported and forgets it: the router stays usable.
  void check(Stream stream = {});

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace megamoe
