// CudaRouter: what a call checks and launches.
#include "kernels/router/router.h"

#include <string>

#include "cuda/device_check.h"
#include "cuda/runtime.h"
#include "cuda/stream_order.h"
#include "megamoe/cuda_router.h"
#include "routing/cuda_router_check.h"

namespace megamoe {
namespace {

using cuda::CurrentDevice;
using gpu::RouterFault;
using gpu::RouterReads;

template <class T>
gpu::RowsOf<const T> rows_of(const ConstTensorView& tensor) {
  return {static_cast<const T*>(tensor.data), tensor.strides[0]};
}
template <class T>
gpu::RowsOf<T> rows_of(const TensorView& tensor) {
  return {static_cast<T*>(tensor.data), tensor.strides[0]};
}

RouterReads reads_of(const detail::RouterCallShape& shape, const ConstTensorView& logits) {
  RouterReads reads;
  reads.num_tokens = shape.num_tokens;
  reads.num_slots = static_cast<std::int32_t>(shape.num_slots);
  reads.logit_dtype = logits.dtype;
  reads.logits_TE = logits.data;
  reads.logit_stride = logits.strides[0];
  return reads;
}
RouterReads reads_of(const ConstTensorView& load) {
  RouterReads reads;
  reads.load = static_cast<const double*>(load.data);
  return reads;
}

Error to_error(const gpu::RouterFailure& failure) {
  const std::string token = "token " + std::to_string(failure.token);
  const std::string index = std::to_string(failure.index);
  const std::string value = std::to_string(failure.value);
  switch (failure.fault) {
    case RouterFault::row_refused:
      return {ErrorCode::invalid_argument,
              "logits or expert ids of " + token + ": a logit is not finite or an id out of range"};
    case RouterFault::logit_not_finite:
      return {ErrorCode::invalid_argument, "logits of " + token + ", expert " + index + " is " +
                                               value + "; logits must be finite"};
    case RouterFault::id_out_of_range:
      return {ErrorCode::expert_id_out_of_range,
              "expert ids of " + token + ", slot " + index + " is " +
                  std::to_string(static_cast<std::int64_t>(failure.value)) +
                  "; ids must lie in [-1, num_experts)"};
    case RouterFault::bias_not_finite:
      return {ErrorCode::invalid_argument,
              "selection_bias of expert " + index + " is " + value + "; biases must be finite"};
    case RouterFault::load_is_no_sum:
      return {ErrorCode::invalid_argument,
              "global_load[" + index + "] is " + value + ", which no sum of loads is"};
    case RouterFault::load_too_small:
      return {ErrorCode::invalid_argument,
              "global_load covers " + value + " tokens, fewer than the " +
                  std::to_string(failure.token) + " of this call alone"};
    case RouterFault::d_aux_not_finite:
      return {ErrorCode::invalid_argument, "d_aux_loss must be finite, is " + value};
    case RouterFault::none:
      break;
  }
  return {ErrorCode::internal, "a router's failure record without a failure"};
}

}  // namespace

struct CudaRouter::Impl {
  /// The device is current.
  Impl(const RouterConfig& router_config, int device_idx)
      : config(router_config),
        device(device_idx),
        refused(device, sizeof(unsigned long long), "a router"),
        load_sums(device,
                  std::int64_t{gpu::kMaxLoadBlocks} * 2 * config.num_experts *
                      static_cast<std::int64_t>(sizeof(double)),
                  "the loads of a router"),
        order(device) {
    gpu::load_router_kernels();
    cudaStream_t stream = nullptr;
    cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    static_assert(gpu::kNothingRefused == ~0ULL);
    cudaError_t status = cudaMemsetAsync(refused.data(), 0xff, sizeof(unsigned long long), stream);
    if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    cuda::check(status, "the first work of a router");
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    const CurrentDevice current(device);
    order.synchronize();
  }

  void throw_recorded_failure() const {
    const volatile gpu::RouterFailure* record = failure.get();
    if (record->is_set != 0) throw to_error(*failure.get());
  }
  void check_memory(const ConstTensorView& tensor, const char* name) const {
    cuda::check_memory(device, tensor, name, "the router");
  }
  [[nodiscard]] gpu::RouterScratch scratch() const {
    return {reinterpret_cast<unsigned long long*>(refused.data()),
            reinterpret_cast<double*>(load_sums.data())};
  }

  /// Runs launch(stream) as one call.
  template <class Launch>
  void enqueue(const RouterReads& reads, Stream stream_handle, const Launch& launch) {
    const cudaStream_t stream = cuda::to_cuda(stream_handle);
    const cuda::StreamOrder::Turn turn(order, stream);
    launch(stream);
    gpu::report_refused(config, reads, scratch(), failure.get(), stream);
  }

  RouterConfig config;
  int device;
  cuda::DeviceMemory refused;
  cuda::DeviceMemory load_sums;
  cuda::PinnedValue<gpu::RouterFailure> failure;
  cuda::StreamOrder order;
};

CudaRouter::CudaRouter(const RouterConfig& config, int device) {
  detail::check_cuda_router_config(config);
  cuda::require_device(device);
  const CurrentDevice current(device);
  impl_ = std::make_unique<Impl>(config, device);
}
CudaRouter::CudaRouter(CudaRouter&&) noexcept = default;
CudaRouter& CudaRouter::operator=(CudaRouter&&) noexcept = default;
CudaRouter::~CudaRouter() = default;

const RouterConfig& CudaRouter::config() const { return impl_->config; }

void CudaRouter::forward(const RouterInputs& inputs, const RouterOutputs& outputs, Stream stream) {
  Impl& router = *impl_;
  const CurrentDevice current(router.device);
  router.throw_recorded_failure();
  const detail::RouterCallShape shape = detail::check_cuda_forward(router.config, inputs, outputs);
  router.check_memory(inputs.logits, "logits");
  router.check_memory(inputs.selection_bias, "selection_bias");
  router.check_memory(inputs.forced_ids, "forced_ids");
  router.check_memory(outputs.expert_ids, "expert_ids");
  router.check_memory(outputs.weights, "weights");
  if (shape.num_tokens == 0) return;
  RouterReads reads = reads_of(shape, inputs.logits);
  reads.ids_TK = rows_of<std::int32_t>(inputs.forced_ids);
  // Forced ids are not selected: their bias is not read.
  if (inputs.forced_ids.absent()) {
    reads.selection_bias_E = static_cast<const float*>(inputs.selection_bias.data);
  }
  router.enqueue(reads, stream, [&](cudaStream_t on) {
    gpu::route(router.config, reads, rows_of<std::int32_t>(outputs.expert_ids),
               rows_of<float>(outputs.weights), router.scratch(), on);
  });
}

void CudaRouter::add_load(const ConstTensorView& logits, const ConstTensorView& expert_ids,
                          const TensorView& load, Stream stream) {
  Impl& router = *impl_;
  const CurrentDevice current(router.device);
  router.throw_recorded_failure();
  const detail::RouterCallShape shape =
      detail::check_cuda_add_load(router.config, logits, expert_ids, load);
  router.check_memory(logits, "logits");
  router.check_memory(expert_ids, "expert_ids");
  router.check_memory(load, "load");
  if (shape.num_tokens == 0) return;
  RouterReads reads = reads_of(shape, logits);
  reads.ids_TK = rows_of<std::int32_t>(expert_ids);
  router.enqueue(reads, stream, [&](cudaStream_t on) {
    gpu::add_load(router.config, reads, static_cast<double*>(load.data), router.scratch(), on);
  });
}

void CudaRouter::aux_loss(const ConstTensorView& global_load, const TensorView& loss,
                          Stream stream) {
  Impl& router = *impl_;
  const CurrentDevice current(router.device);
  router.throw_recorded_failure();
  detail::check_cuda_aux_loss(router.config, global_load, loss);
  router.check_memory(global_load, "global_load");
  router.check_memory(loss, "loss");
  const RouterReads reads = reads_of(global_load);
  router.enqueue(reads, stream, [&](cudaStream_t on) {
    gpu::aux_loss(router.config, reads, static_cast<float*>(loss.data), router.scratch(), on);
  });
}

void CudaRouter::backward(const CudaRouterBackwardInputs& inputs, const TensorView& d_logits,
                          Stream stream) {
  Impl& router = *impl_;
  const CurrentDevice current(router.device);
  router.throw_recorded_failure();
  const detail::RouterCallShape shape =
      detail::check_cuda_backward(router.config, inputs, d_logits);
  router.check_memory(inputs.logits, "logits");
  router.check_memory(inputs.expert_ids, "expert_ids");
  router.check_memory(inputs.d_weights, "d_weights");
  router.check_memory(d_logits, "d_logits");
  const bool has_aux_loss = router.config.aux_loss_alpha != 0.0F;
  if (has_aux_loss) {
    router.check_memory(inputs.global_load, "global_load");
    router.check_memory(inputs.d_aux_loss, "d_aux_loss");
  }
  if (shape.num_tokens == 0) return;
  RouterReads reads = reads_of(shape, inputs.logits);
  reads.ids_TK = rows_of<std::int32_t>(inputs.expert_ids);
  reads.d_weights_TK = rows_of<float>(inputs.d_weights);
  if (has_aux_loss) {
    reads.load = static_cast<const double*>(inputs.global_load.data);
    reads.d_aux_loss = static_cast<const float*>(inputs.d_aux_loss.data);
  }
  router.enqueue(reads, stream, [&](cudaStream_t on) {
    gpu::route_backward(router.config, reads, rows_of<float>(d_logits), router.scratch(), on);
  });
}

void CudaRouter::update_selection_bias(const ConstTensorView& global_load, float rate,
                                       const TensorView& selection_bias, Stream stream) {
  Impl& router = *impl_;
  const CurrentDevice current(router.device);
  router.throw_recorded_failure();
  detail::check_cuda_bias_update(router.config, global_load, rate, selection_bias);
  router.check_memory(global_load, "global_load");
  router.check_memory(selection_bias, "selection_bias");
  const RouterReads reads = reads_of(global_load);
  router.enqueue(reads, stream, [&](cudaStream_t on) {
    gpu::update_bias(router.config, reads, rate, static_cast<float*>(selection_bias.data),
                     router.scratch(), on);
  });
}

void CudaRouter::check(Stream stream) {
  Impl& router = *impl_;
  const CurrentDevice current(router.device);
  cuda::check(cudaStreamSynchronize(cuda::to_cuda(stream)), "CudaRouter::check");
  router.order.synchronize();
  gpu::RouterFailure& record = *router.failure.get();
  if (record.is_set == 0) return;
  const Error error = to_error(record);
  record = {};
  throw error;
}

}  // namespace megamoe
