#include "cuda/backend.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>

#include "base/longest_wait.h"
#include "cuda/call_tensors.h"
#include "cuda/check_arguments.h"
#include "cuda/entry.h"
#include "kernels/exchange/exchange.h"
#include "kernels/forward/forward.h"
#include "kernels/launch.h"
#include "schedule/backward_order.h"

namespace megamoe::cuda {
namespace {

using device::Signal;
using gpu::CallKind;

/// Rows whose g and u are kept, as the row buffers count them.
std::int64_t padded_saved_rows(const LayerConfig& config, int num_ranks,
                               const WorkspaceDims& dims) {
  const std::int64_t saved = resolved_saved_row_capacity(config, num_ranks);
  if (saved == 0) return 0;
  if (saved >= dims.row_capacity) return padded_row_capacity(dims);
  WorkspaceDims of_saved = dims;
  of_saved.row_capacity = saved;
  return std::min(padded_row_capacity(of_saved), padded_row_capacity(dims));
}

std::uint64_t to_ns(double seconds) {
  return static_cast<std::uint64_t>(std::min(seconds, kLongestWaitS) * 1e9);
}

}  // namespace

bool is_built() { return true; }

std::unique_ptr<WorkspaceMemory> make_workspace_memory(const LayerConfig& config,
                                                       Workspace::Impl& workspace) {
  return std::make_unique<CudaWorkspace>(config, workspace);
}

std::unique_ptr<LayerBackend> make_backend(const LayerConfig& config, Workspace::Impl& workspace) {
  return std::make_unique<CudaBackend>(config, workspace);
}

CudaBackend::CudaBackend(const LayerConfig& config, Workspace::Impl& workspace)
    : config_(config),
      workspace_(workspace),
      memory_(static_cast<CudaWorkspace&>(*workspace.memory)),
      dims_(workspace_dims(config, workspace.communicator.size())),
      padded_rows_(padded_row_capacity(dims_)),
      saved_rows_(padded_saved_rows(config, workspace.communicator.size(), dims_)),
      expected_(expected_shape(config, workspace.communicator.size())),
      view_(gpu::make_rank_view(dims_, workspace.communicator.rank())),
      rows_(make_buffers()),
      layer_number_(workspace.num_layers_built++) {
  for (int peer = 0; peer < workspace.communicator.size(); ++peer) {
    view_.symmetric_R[peer] = workspace.symmetric->peer(peer);
  }
  view_.scratch = memory_.local.data();
  view_.failure = memory_.failure.get();
  view_.has_left_R = memory_.calls->has_left_R.get();
  view_.entry_deadline_ns = to_ns(config.entry_deadline_s);
  view_.inner_deadline_ns = to_ns(config.inner_deadline_s);
  const auto* ordered = dynamic_cast<const OrderedCommunicator*>(&workspace.communicator);
  if (ordered == nullptr || ordered->hosts().link == nullptr) return;
  const CurrentDevice current(memory_.device);
  hosts_ = std::make_unique<Hosts>(config_, workspace, ordered->hosts());
  hosts_->complete(view_, *workspace.symmetric);
  network_view_ = view_;
  network_view_.failure = memory_.network_failure->get();
  hosts_->use(network_view_);
}

CudaBackend::RowBuffers CudaBackend::make_buffers() const {
  std::byte* local = memory_.local.data();
  const LocalLayout layout = gpu_local_layout(dims_).rows;
  const std::int64_t hidden = dims_.hidden_dim;
  const std::int64_t intermediate = dims_.intermediate_dim;
  return {tensor_view(layout.x_CH.in(local), {padded_rows_, hidden}),
          tensor_view(layout.dy_CH.in(local), {padded_rows_, hidden}),
          tensor_view(layout.a_CI.in(local), {padded_rows_, intermediate}),
          expected_.gated ? tensor_view(layout.dg_CI.in(local), {padded_rows_, intermediate})
                          : TensorView{},
          tensor_view(layout.du_CI.in(local), {padded_rows_, intermediate}),
          layout.origin_C.in(local),
          layout.weight_C.in(local),
          layout.dweight_segments.in(local)};
}

std::unique_ptr<CallState> CudaBackend::new_call_state() const {
  return std::make_unique<CudaCallState>(memory_.device, dims_, saved_rows_, expected_.gated);
}

/// What a context keeps of g or u: absent where it keeps nothing, as of g without a gate.
TensorView CudaBackend::kept_tensor(const DeviceMemory& memory) const {
  if (memory.data() == nullptr) return {};
  return tensor_view(reinterpret_cast<bf16*>(memory.data()), {saved_rows_, dims_.intermediate_dim});
}

products::GroupedRows CudaBackend::all_rows(std::byte* plan) const {
  const CallPlanLayout& layout = view_.plan_layout;
  return {layout.group_begin_e.in(plan), layout.group_count_e.in(plan),
          dims_.routing.experts_per_rank()};
}
products::GroupedRows CudaBackend::kept_rows(std::byte* plan) const {
  const CallPlanLayout& layout = view_.plan_layout;
  return {layout.group_begin_e.in(plan), layout.kept_count_e.in(plan),
          dims_.routing.experts_per_rank()};
}
products::GroupedRows CudaBackend::other_rows(std::byte* plan) const {
  const CallPlanLayout& layout = view_.plan_layout;
  return {layout.other_begin_e.in(plan), layout.other_count_e.in(plan),
          dims_.routing.experts_per_rank()};
}

/// Peers have about as many tokens as this rank, so an expert's rows are about these.
products::LaunchOptions CudaBackend::launch_options(std::int64_t num_tokens, cudaStream_t stream) {
  products::LaunchOptions options;
  options.stream = stream;
  options.tensor_maps = &tensor_maps_;
  options.num_sms = config_.num_sms;
  options.expected_group_rows = static_cast<int>(num_tokens * dims_.routing.num_ranks *
                                                 dims_.routing.top_k / dims_.routing.num_experts);
  options.ends = view_.control()->product_ends;
  options.trace = memory_.trace;
  return options;
}

std::uint64_t CudaBackend::tag(CallKind kind) const {
  return static_cast<std::uint64_t>(layer_number_) * 2 + (kind == CallKind::backward ? 1 : 0);
}

std::uint64_t CudaBackend::capture_of(Stream stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(to_cuda(stream), &status, &id) != cudaSuccess) {
    cudaGetLastError();  // the call says it
    return 0;
  }
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

void CudaBackend::forward(std::unique_ptr<CallState>& call_state, const ForwardInput& input,
                          const ForwardOutput& output, Stream stream_handle) {
  const Occupied occupied(workspace_.in_use);
  const CurrentDevice current(memory_.device);
  const cudaStream_t stream = to_cuda(stream_handle);
  if (hosts_ != nullptr) {
    forward_over_hosts(call_state, input, output, stream);
    return;
  }
  std::int64_t num_tokens = 0;
  or_refuse(CallKind::forward, stream, [&] {
    throw_recorded_failure();
    num_tokens = validate_forward(expected_, input, output);
    check_forward_memory(memory_.device, input, output);
    const bool is_captured = is_capturing(stream);
    if (call_state != nullptr) {
      if (is_captured && !call_state->is_in_graph()) call_state->graph = capturing_graph(stream);
      return;
    }
    if (is_captured) {
      throw Error(ErrorCode::invalid_argument,
                  "a captured forward call needs a context that exists already: as many forward "
                  "calls before the capture, their contexts kept until all are made");
    }
    call_state = new_call_state();
  });
  auto& state = static_cast<CudaCallState&>(*call_state);
  state.num_tokens = num_tokens;
  state.stream = stream;
  state.rows_known = false;
  enqueue(stream, [&](CallOrder& order) { enqueue_forward(state, input, output, order, stream); });
}

gpu::RankView CudaBackend::view_after(const CallOrder& order, gpu::RankView view) {
  if (order.is_late()) view.entry_deadline_ns = view.inner_deadline_ns = 0;
  return view;
}

void CudaBackend::enter(CallOrder& order,
                        const std::function<void(const gpu::RankView&, gpu::EnterPart)>& launch) {
  if (!order.is_shared()) {
    launch(view_, gpu::EnterPart::whole);
    return;
  }
  launch(view_, gpu::EnterPart::announcement);
  order.meet(Signal::entered);
  launch(view_after(order, view_), gpu::EnterPart::rest);
}

void CudaBackend::meet(Signal what, std::byte* plan, CallOrder& order, cudaStream_t stream) {
  if (order.is_shared()) {
    gpu::announce(view_, what, stream);
    order.meet(what);
  }
  gpu::meet(view_after(order, view_), plan, what, stream);
}

void CudaBackend::enqueue_forward(CudaCallState& state, const ForwardInput& input,
                                  const ForwardOutput& output, CallOrder& order,
                                  cudaStream_t stream) {
  const std::int64_t num_tokens = state.num_tokens;
  std::byte* plan = state.plan.data();
  const gpu::RoutingInput routing = routing_input(input);
  const ExpertWeights experts = with_plain_strides(input.experts);
  const products::LaunchOptions launch = launch_options(num_tokens, stream);
  const TensorView g = kept_tensor(state.saved_g);
  const TensorView u = kept_tensor(state.saved_u);

  memory_.stages.start("stage_and_plan", stream);
  SideStream::Fork beside(memory_.side, stream);
  gpu::count_slots(view_, plan, routing, num_tokens, beside.stream());
  enter(order, [&](const gpu::RankView& view, gpu::EnterPart part) {
    gpu::enter_call(view, plan, CallKind::forward, tag(CallKind::forward), num_tokens,
                    beside.stream(), part);
  });
  gpu::write_pull_lists(view_, plan, num_tokens, beside.stream());
  gpu::stage_forward(view_, rows_input(input.x), num_tokens, stream);
  beside.join();
  memory_.stages.start("meet_rows", stream);
  meet(Signal::rows_staged, plan, order, stream);
  const gpu::PulledRows pulled{rows_of(rows_.x_CH), nullptr, nullptr, rows_.origin_C};
  if (config_.overlap == Overlap::on) {
    memory_.stages.start("order_pulls", stream);
    gpu::order_pulls(view_, plan, pulled, stream);
    memory_.stages.start("gate_up", stream);
    gpu::gate_up_and_pull(view_, plan, config_.activation, pulled,
                          {experts.gate, experts.up, g, u, rows_.a_CI}, launch);
    memory_.stages.start("down", stream);
    gpu::down_and_push(view_, plan, rows_.origin_C, rows_.a_CI, experts.down, launch);
  } else {
    memory_.stages.start("pull", stream);
    gpu::pull_rows(view_, plan, pulled, stream);
    memory_.stages.start("gate_up", stream);
    products::multiply_gate_up(all_rows(plan), config_.activation, rows_.x_CH, experts.gate,
                               experts.up, g, u, rows_.a_CI, launch);
    memory_.stages.start("down", stream);
    products::multiply_down(all_rows(plan), rows_.a_CI, experts.down, rows_.dy_CH, launch);
    memory_.stages.start("push", stream);
    gpu::push_rows(view_, plan, rows_of(rows_.dy_CH), rows_.origin_C, {}, stream);
  }
  memory_.stages.start("meet_results", stream);
  meet(Signal::results_sent, plan, order, stream);
  memory_.stages.start("reduce", stream);
  gpu::reduce_outputs(view_, plan, rows_output(output.y), num_tokens, stream);
  memory_.stages.start(StageClock::kEnd, stream);
}

/// g and u of the rows of `groups` from their x, into the buffers of dg and du, which then take
/// their place.
void CudaBackend::gradient_of_unsaved(const products::GroupedRows& groups,
                                      const BackwardInput& input,
                                      const products::LaunchOptions& launch) {
  memory_.stages.start("gate_up_again", launch.stream);
  products::multiply_gate_up(groups, config_.activation, rows_.x_CH, input.experts.gate,
                             input.experts.up, rows_.dg_CI, rows_.du_CI, rows_.a_CI, launch);
  gradient_of(groups, rows_.dg_CI, rows_.du_CI, input, launch);
}

void CudaBackend::gradient_of(const products::GroupedRows& groups, const TensorView& g_CI,
                              const TensorView& u_CI, const BackwardInput& input,
                              const products::LaunchOptions& launch) {
  memory_.stages.start("p", launch.stream);
  products::multiply_gate_up_gradient(
      groups, config_.activation, rows_.dy_CH, input.experts.down, g_CI, u_CI, rows_.weight_C,
      {rows_.dg_CI, rows_.du_CI, rows_.a_CI, rows_.dweight_segments}, launch);
}

/// Rows to this rank, then dg, du and w a: where g and u are kept, from them, else from g and u
/// that are computed again.
void CudaBackend::gate_up_gradient(const CudaCallState& state, const BackwardInput& input,
                                   const products::LaunchOptions& launch) {
  std::byte* plan = state.plan.data();
  const gpu::PulledRows pulled{rows_of(rows_.x_CH), rows_of(rows_.dy_CH), rows_.weight_C,
                               rows_.origin_C};
  const bool overlap = config_.overlap == Overlap::on;
  memory_.stages.start(overlap ? "order_pulls" : "pull", launch.stream);
  if (overlap) {
    gpu::order_pulls(view_, plan, pulled, launch.stream);
  } else {
    gpu::pull_rows(view_, plan, pulled, launch.stream);
  }
  if (saved_rows_ == 0) {
    if (!overlap) {
      gradient_of_unsaved(all_rows(plan), input, launch);
      return;
    }
    memory_.stages.start("gate_up_again", launch.stream);
    gpu::gate_up_and_pull(
        view_, plan, config_.activation, pulled,
        {input.experts.gate, input.experts.up, rows_.dg_CI, rows_.du_CI, rows_.a_CI}, launch);
    gradient_of(all_rows(plan), rows_.dg_CI, rows_.du_CI, input, launch);
    return;
  }
  const bool all_saved = saved_rows_ == padded_rows_;
  if (!all_saved) gpu::split_groups(view_, plan, saved_rows_, launch.stream);
  const products::GroupedRows kept = all_saved ? all_rows(plan) : kept_rows(plan);
  if (overlap) {
    memory_.stages.start("p", launch.stream);
    // Where no row needs g and u again, only the weight gradients need x.
    gpu::gate_up_gradient_and_pull(view_, kept, config_.activation, pulled, input.experts.down,
                                   kept_tensor(state.saved_g), kept_tensor(state.saved_u),
                                   {rows_.dg_CI, rows_.du_CI, rows_.a_CI, rows_.dweight_segments},
                                   gpu::LastPass::by_weight_gradients, launch);
  } else {
    gradient_of(kept, kept_tensor(state.saved_g), kept_tensor(state.saved_u), input, launch);
  }
  if (all_saved) return;
  products::LaunchOptions unmeasured =
      launch;  // else its ends would mix with those of the kept rows
  unmeasured.ends = nullptr;
  gradient_of_unsaved(other_rows(plan), input, unmeasured);
}

std::array<products::WeightGradient, 3> CudaBackend::gradient_jobs(
    const ExpertGradients& gradients) const {
  return {{{rows_.dy_CH, rows_.a_CI, with_plain_strides(gradients.down)},
           {rows_.du_CI, rows_.x_CH, with_plain_strides(gradients.up)},
           {rows_.dg_CI, rows_.x_CH, with_plain_strides(gradients.gate)}}};
}
products::GradientMode CudaBackend::gradient_mode() const {
  return config_.weight_gradient_mode == WeightGradientMode::accumulate_fp32
             ? products::GradientMode::accumulate
             : products::GradientMode::store;
}

schedule::SmSplit CudaBackend::sms_beside_dx(const products::LaunchOptions& launch) const {
  if (gradient_mode() == products::GradientMode::store) return {};
  const int num_sms = launch.num_sms == 0 ? gpu::num_multiprocessors()
                                          : std::min(launch.num_sms, gpu::num_multiprocessors());
  return schedule::split_sms(num_sms, launch.expected_group_rows);
}

void CudaBackend::gradients_beside_rows(std::byte* plan, std::int64_t num_tokens,
                                        const BackwardInput& input, const BackwardOutput& output,
                                        const gpu::DweightSegments& segments, CallOrder& order,
                                        const products::LaunchOptions& launch) {
  const auto all_gradients = gradient_jobs(output.experts);
  const std::span gradients = std::span(all_gradients).first(num_gradient_jobs());
  gpu::RowsBeside beside;
  if (saved_rows_ > 0) beside.x_CH = rows_of(rows_.x_CH);
  beside.dx_TH = rows_output(output.dx);
  beside.dweights_TK = dweights_output(output.dweights);
  beside.num_tokens = num_tokens;
  const schedule::SmSplit sms = sms_beside_dx(launch);
  const bool is_beside_dx = sms.gradients > 0;
  products::LaunchOptions dx_launch = launch;
  products::LaunchOptions behind_dx = launch;
  if (is_beside_dx) {
    dx_launch.num_sms = behind_dx.num_sms = sms.dx;
    dx_launch.ends = nullptr;  // its SMs go on with weight gradients
  }
  // All launches take tiles from one counter: that behind dx begins on the SMs that dx leaves.
  const auto launch_gradients = [&](const products::LaunchOptions& options) {
    gpu::weight_gradients_beside_rows(view_, plan, gradients, gradient_mode(), beside, options);
  };
  std::optional<SideStream::Fork> fork;
  memory_.stages.start("dx", launch.stream);
  for (const schedule::BackwardStep& step : schedule::kGradientsBesideRows) {
    if (!schedule::takes_place(step.launch, is_beside_dx)) continue;
    const bool is_beside = step.stream == schedule::LaunchStream::beside;
    const cudaStream_t stream = is_beside ? fork->stream() : launch.stream;
    switch (step.launch) {
      case schedule::BackwardLaunch::fork:
        fork.emplace(memory_.gradients_side, stream);
        break;
      case schedule::BackwardLaunch::dx_and_push:
        dx_launch.stream = stream;
        gpu::dx_and_push(view_, plan, rows_.origin_C, rows_.dg_CI, rows_.du_CI, input.experts.gate,
                         input.experts.up, dx_launch);
        break;
      case schedule::BackwardLaunch::gradients_beside_dx: {
        products::LaunchOptions beside_dx = launch;
        beside_dx.stream = stream;
        beside_dx.num_sms = sms.gradients;
        launch_gradients(beside_dx);
        break;
      }
      case schedule::BackwardLaunch::push_dweights:
        memory_.stages.start("push", stream);
        gpu::push_dweights(view_, plan, rows_.origin_C, segments, stream);
        break;
      case schedule::BackwardLaunch::announce:
        gpu::announce(view_, Signal::gradients_sent, stream);
        break;
      case schedule::BackwardLaunch::gradients_behind_dx:
        memory_.stages.start("weight_gradients", stream);
        behind_dx.stream = stream;
        launch_gradients(behind_dx);
        break;
      case schedule::BackwardLaunch::join:
        fork->join();
        break;
      case schedule::BackwardLaunch::meet_results:
        memory_.stages.start("meet_results", stream);
        meet(Signal::results_sent, plan, order, stream);
        break;
      case schedule::BackwardLaunch::reduce_rest:
        memory_.stages.start("reduce", stream);
        gpu::reduce_other_gradients(view_, plan, beside.dx_TH, beside.dweights_TK, num_tokens,
                                    stream);
        break;
    }
  }
}

void CudaBackend::gradients_one_after_the_other(std::byte* plan, const BackwardInput& input,
                                                const BackwardOutput& output,
                                                const gpu::DweightSegments& segments,
                                                CallOrder& order,
                                                const products::LaunchOptions& launch) {
  const auto gradients = gradient_jobs(output.experts);
  memory_.stages.start("weight_gradients", launch.stream);
  products::multiply_weight_gradients(
      all_rows(plan), std::span(gradients).first(num_gradient_jobs()), gradient_mode(), launch,
      &view_.control()->call_failed, view_.num_tiles_taken(device::ProductKind::weight_gradients));
  // They have read x: dx takes its place.
  memory_.stages.start("dx", launch.stream);
  products::multiply_dx(all_rows(plan), rows_.dg_CI, rows_.du_CI, input.experts.gate,
                        input.experts.up, rows_.x_CH, launch);
  memory_.stages.start("push", launch.stream);
  gpu::push_rows(view_, plan, rows_of(rows_.x_CH), rows_.origin_C, segments, launch.stream);
  memory_.stages.start("meet_results", launch.stream);
  meet(Signal::results_sent, plan, order, launch.stream);
}

void CudaBackend::backward(const CallState* call_state, const BackwardInput& input,
                           const BackwardOutput& output, Stream stream_handle) {
  const Occupied occupied(workspace_.in_use);
  const CurrentDevice current(memory_.device);
  const cudaStream_t stream = to_cuda(stream_handle);
  const auto* own_state = static_cast<const CudaCallState*>(call_state);
  if (hosts_ != nullptr) {
    backward_over_hosts(own_state, input, output, stream);
    return;
  }
  or_refuse(CallKind::backward, stream, [&] {
    throw_recorded_failure();
    if (own_state == nullptr) {
      throw Error(ErrorCode::invalid_argument,
                  "context is not of a forward call of this layer (empty, or another layer's)");
    }
    validate_backward(expected_, own_state->num_tokens, input, output);
    check_backward_memory(memory_.device, input, output);
  });
  enqueue(stream,
          [&](CallOrder& order) { enqueue_backward(*own_state, input, output, order, stream); });
}

void CudaBackend::enqueue_backward(const CudaCallState& state, const BackwardInput& input,
                                   const BackwardOutput& output, CallOrder& order,
                                   cudaStream_t stream) {
  const std::int64_t num_tokens = state.num_tokens;
  std::byte* plan = state.plan.data();
  BackwardInput in = input;
  in.experts = with_plain_strides(input.experts);
  const products::LaunchOptions launch = launch_options(num_tokens, stream);

  memory_.stages.start("stage_and_plan", stream);
  SideStream::Fork beside(memory_.side, stream);
  gpu::count_planned_slots(view_, plan, num_tokens, beside.stream());
  enter(order, [&](const gpu::RankView& view, gpu::EnterPart part) {
    gpu::enter_call(view, plan, CallKind::backward, tag(CallKind::backward), num_tokens,
                    beside.stream(), part);
  });
  gpu::write_pull_lists(view_, plan, num_tokens, beside.stream());
  gpu::stage_backward(view_, plan, rows_input(in.x), rows_input(in.dy), num_tokens, stream);
  beside.join();
  memory_.stages.start("meet_rows", stream);
  meet(Signal::rows_staged, plan, order, stream);
  gate_up_gradient(state, in, launch);
  const gpu::DweightSegments segments{
      rows_.dweight_segments, padded_rows_,
      static_cast<std::int32_t>(num_dweight_segments(dims_.intermediate_dim))};
  if (config_.overlap == Overlap::on) {
    gradients_beside_rows(plan, num_tokens, in, output, segments, order, launch);
  } else {
    gradients_one_after_the_other(plan, in, output, segments, order, launch);
    memory_.stages.start("reduce", stream);
    gpu::reduce_gradients(view_, plan, rows_output(output.dx), dweights_output(output.dweights),
                          num_tokens, stream);
  }
  memory_.stages.start(StageClock::kEnd, stream);
}

}  // namespace megamoe::cuda
