// The CUDA backend: what a call launches. docs/gpu_exchange.md tells the path of a row through it.
#pragma once

#include <array>
#include <exception>
#include <functional>
#include <optional>

#include "cuda/call_order.h"
#include "cuda/call_state.h"
#include "cuda/hosts.h"
#include "cuda/workspace.h"
#include "device/tensor_map_cache.h"
#include "kernels/exchange/exchange.h"
#include "kernels/plan/plan.h"
#include "kernels/products/products.h"
#include "kernels/rank_view.h"
#include "layer/backend.h"
#include "layer/validate.h"
#include "schedule/beside_dx.h"

namespace megamoe::cuda {

class CudaBackend final : public LayerBackend {
 public:
  CudaBackend(const LayerConfig& config, Workspace::Impl& workspace);

  [[nodiscard]] std::uint64_t capture_of(Stream stream) const override;
  void forward(std::unique_ptr<CallState>& state, const ForwardInput& input,
               const ForwardOutput& output, Stream stream) override;
  void backward(const CallState* state, const BackwardInput& input, const BackwardOutput& output,
                Stream stream) override;
  void check(Stream stream) override;

 private:
  /// Row buffers of the workspace.
  struct RowBuffers {
    TensorView x_CH;
    TensorView dy_CH;  ///< o rows in a forward call
    TensorView a_CI;
    TensorView dg_CI;
    TensorView du_CI;
    RowOrigin* origin_C;
    float* weight_C;
    float* dweight_segments;
  };

  RowBuffers make_buffers() const;
  std::unique_ptr<CallState> new_call_state() const;
  TensorView kept_tensor(const DeviceMemory& memory) const;
  products::GroupedRows all_rows(std::byte* plan) const;
  products::GroupedRows kept_rows(std::byte* plan) const;
  products::GroupedRows other_rows(std::byte* plan) const;
  products::LaunchOptions launch_options(std::int64_t num_tokens, cudaStream_t stream);
  std::uint64_t tag(gpu::CallKind kind) const;

  /// Runs what the host checks before a call; where it throws, peers learn that the call fails.
  void or_refuse(gpu::CallKind kind, cudaStream_t stream, const std::function<void()>& checks);
  void throw_recorded_failure() const;
  /// Enqueues a call. Where a launch throws the call cannot be completed any more: peers learn that
  /// this rank has failed for good.
  void enqueue(cudaStream_t stream, const std::function<void(CallOrder&)>& launches);
  void wait_for(cudaStream_t stream);
  /// What a failure record says, which is set, and what the group knows about it.
  [[nodiscard]] Error recorded_failure(const device::FailureRecord& record) const;
  [[nodiscard]] Error because_of_departure(const Error& error, int peer) const;
  /// Of a call whose launches `thrown` has ended.
  [[nodiscard]] Error not_enqueued(const std::exception_ptr& thrown) const;

  void enqueue_forward(CudaCallState& state, const ForwardInput& input, const ForwardOutput& output,
                       CallOrder& order, cudaStream_t stream);
  void enqueue_backward(const CudaCallState& state, const BackwardInput& input,
                        const BackwardOutput& output, CallOrder& order, cudaStream_t stream);
  /// For waits that follow a meeting of hosts: without patience where that was late.
  [[nodiscard]] static gpu::RankView view_after(const CallOrder& order, gpu::RankView view);
  /// Entering a call, and gpu::meet(), in two parts where ranks share the GPU.
  void enter(CallOrder& order,
             const std::function<void(const gpu::RankView&, gpu::EnterPart)>& launch);
  void meet(device::Signal what, std::byte* plan, CallOrder& order, cudaStream_t stream);

  // Where the group spans several hosts (backend_hosts.cc): ranks agree about a call on the host.
  void forward_over_hosts(std::unique_ptr<CallState>& state, const ForwardInput& input,
                          const ForwardOutput& output, cudaStream_t stream);
  void backward_over_hosts(const CudaCallState* state, const BackwardInput& input,
                           const BackwardOutput& output, cudaStream_t stream);
  void check_over_hosts(cudaStream_t stream) const;
  /// As enqueue().
  void enqueue_over_hosts(const StreamOrder::Turn& turn, cudaStream_t stream,
                          const std::function<void(CallOrder&)>& launches);
  /// What is not agreed about ends the group: where something has happened to this rank, tells the
  /// peers, and throws it.
  void throw_if_over();
  void wait_for_counts() const;
  /// What follows the agreement, on the caller's stream and, with all transfers, beside it.
  void enqueue_forward_over_hosts(CudaCallState& state, const ForwardInput& input,
                                  const ForwardOutput& output, CallOrder& order,
                                  cudaStream_t stream, SideStream::Fork& beside);
  void enqueue_backward_over_hosts(const CudaCallState& state, const BackwardInput& input,
                                   const BackwardOutput& output, CallOrder& order,
                                   cudaStream_t stream, SideStream::Fork& beside);
  /// Routing and the first group's rows; then group by group: `compute`, on the caller's stream,
  /// which begins when the group's rows are there, and beside it the next group's rows and the
  /// results of this one.
  void group_by_group(gpu::CallKind kind, const CudaCallState& state, CallOrder& order,
                      cudaStream_t stream, SideStream::Fork& beside,
                      const std::function<void(std::int32_t group)>& compute);
  void announce_results(std::int32_t group, cudaStream_t stream);
  void gradient_of_group(const CudaCallState& state, const gpu::ExpertRange& experts,
                         const BackwardInput& input, const products::LaunchOptions& launch);
  [[nodiscard]] products::LaunchOptions launch_beside_transfers(std::int64_t num_tokens,
                                                                cudaStream_t stream);

  // Parts of enqueue_backward().
  void gate_up_gradient(const CudaCallState& state, const BackwardInput& input,
                        const products::LaunchOptions& launch);
  void gradient_of(const products::GroupedRows& groups, const TensorView& g_CI,
                   const TensorView& u_CI, const BackwardInput& input,
                   const products::LaunchOptions& launch);
  void gradient_of_unsaved(const products::GroupedRows& groups, const BackwardInput& input,
                           const products::LaunchOptions& launch);
  /// Where gradients are added: those on which the first of them run beside dx.
  [[nodiscard]] schedule::SmSplit sms_beside_dx(const products::LaunchOptions& launch) const;
  /// dx leaves while it is computed; beside the weight gradients what is still to come arrives.
  void gradients_beside_rows(std::byte* plan, std::int64_t num_tokens, const BackwardInput& input,
                             const BackwardOutput& output, const gpu::DweightSegments& segments,
                             CallOrder& order, const products::LaunchOptions& launch);
  void gradients_one_after_the_other(std::byte* plan, const BackwardInput& input,
                                     const BackwardOutput& output,
                                     const gpu::DweightSegments& segments, CallOrder& order,
                                     const products::LaunchOptions& launch);
  /// Of down, up and gate. The first does not read x.
  [[nodiscard]] std::array<products::WeightGradient, 3> gradient_jobs(
      const ExpertGradients& gradients) const;
  [[nodiscard]] std::size_t num_gradient_jobs() const { return expected_.gated ? 3 : 2; }
  [[nodiscard]] products::GradientMode gradient_mode() const;

  LayerConfig config_;
  Workspace::Impl& workspace_;
  CudaWorkspace& memory_;
  WorkspaceDims dims_;
  std::int64_t padded_rows_;
  std::int64_t saved_rows_;  ///< padded; g and u of rows before it are kept
  ExpectedShape expected_;
  gpu::RankView view_;
  RowBuffers rows_;
  std::int64_t layer_number_;
  device::TensorMapCache tensor_maps_;
  std::unique_ptr<Hosts> hosts_;  ///< null on one host
  gpu::RankView network_view_;    ///< of what runs beside the caller's stream
};

}  // namespace megamoe::cuda
