// Calls of a group that spans several hosts: what they launch, and what they wait for.
//
// Experts are cut into groups of neighbours. All rows of an expert, from all hosts, are in place
// before its products run, in the order that they have on one host: so bits are the same. While one
// group is computed, the next one's tokens and the last one's results travel on the stream beside
// the caller's. Work that waits for other work of this rank waits by events, and for what was
// enqueued before it; kernels wait for other ranks of the host only.
//
// The host waits once a forward call, for the counts: NCCL wants to know how much it sends. Where
// the routing is known to it, in a backward call, it waits for no device.
#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>

#include "cuda/backend.h"
#include "cuda/call_tensors.h"
#include "cuda/check_arguments.h"
#include "kernels/failure.h"
#include "kernels/launch.h"

namespace megamoe::cuda {
namespace {

using device::Signal;
using gpu::ExpertRange;

/// The experts of a range of a [e, ...] tensor.
template <class View>
View of_experts(View tensor, const ExpertRange& experts) {
  if (tensor.absent() || tensor.data == nullptr) return tensor;
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(tensor.data)>>,
                                  const std::byte, std::byte>;
  tensor.data = static_cast<Byte*>(tensor.data) +
                experts.first * tensor.strides[0] * dtype_bytes(tensor.dtype);
  tensor.sizes[0] = experts.end - experts.first;
  return tensor;
}

products::GroupedRows of_experts(const products::GroupedRows& rows, const ExpertRange& experts) {
  return {rows.begin + experts.first, rows.count + experts.first, experts.end - experts.first};
}

ExpertWeights of_experts(const ExpertWeights& weights, const ExpertRange& experts) {
  return {of_experts(weights.gate, experts), of_experts(weights.up, experts),
          of_experts(weights.down, experts)};
}

}  // namespace

void CudaBackend::check_over_hosts(cudaStream_t stream) const {
  if (is_capturing(stream)) {
    throw Error(ErrorCode::unsupported,
                "a call over several hosts within a stream capture: the host must know how much "
                "travels");
  }
  memory_.check_device(stream);
  memory_.check_fork(stream);
}

/// What joins the hosts knows best whom it waited for.
void CudaBackend::throw_if_over() {
  const auto find = [&]() -> std::optional<Error> {
    if (memory_.given_up) return memory_.given_up;
    if (const std::optional<Error> failure = hosts_->link().failure()) {
      return failure->code() == ErrorCode::peer_failed ? because_of_departure(*failure, -1)
                                                       : *failure;
    }
    for (const device::FailureRecord* record :
         {memory_.failure.get(), memory_.network_failure->get()}) {
      const volatile std::uint32_t* is_set = &record->is_set;
      if (*is_set != 0) return recorded_failure(*record);
    }
    return std::nullopt;
  };
  const std::optional<Error> why = find();
  if (!why) return;
  memory_.given_up = why;  // the link's failure will be that the group has been aborted
  memory_.calls->has_failed = true;
  workspace_.communicator.abort(why->what());
  throw Error(*why);
}

void CudaBackend::enqueue_over_hosts(const StreamOrder::Turn& turn, cudaStream_t stream,
                                     const std::function<void(CallOrder&)>& launches) {
  CallOrder order(*memory_.calls, workspace_.communicator, config_, turn);
  try {
    launches(order);
  } catch (...) {
    if (!hosts_->link().failure()) memory_.given_up = not_enqueued(std::current_exception());
    try {
      gpu::give_up_on_host(view_, hosts_->host_view(), stream);
    } catch (const Error&) {
      // The device is lost: peers learn of it from the host group.
    }
    throw_if_over();
  }
}

/// Of the device: it may be at a call before this one, which waits for peers. Where one of them has
/// gone, RankCalls::watch and the link end that.
void CudaBackend::wait_for_counts() const {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kBusy{2};
  const Clock::time_point start = Clock::now();
  while (!hosts_->counts_are_known()) {
    if (Clock::now() - start > kBusy) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void CudaBackend::forward_over_hosts(std::unique_ptr<CallState>& call_state,
                                     const ForwardInput& input, const ForwardOutput& output,
                                     cudaStream_t stream) {
  throw_if_over();
  CallHeader header{megamoe::CallKind::forward, workspace_.group_id, layer_number_, -1, {}};
  std::ranges::fill(hosts_->entry().counts(), 0);
  std::int64_t num_tokens = 0;
  header.outcome = outcome_of([&] {
    check_over_hosts(stream);
    num_tokens = validate_forward(expected_, input, output);
    check_forward_memory(memory_.device, input, output);
    if (call_state == nullptr) call_state = new_call_state();
  });
  std::optional<StreamOrder::Turn> turn;
  std::optional<SideStream::Fork> beside;
  if (header.outcome.failed == 0) {
    auto& state = static_cast<CudaCallState&>(*call_state);
    header.outcome = outcome_of([&] {
      turn.emplace(memory_.calls->order, stream);
      memory_.stages.start("stage_and_plan", stream);
      beside.emplace(memory_.side, stream);
      gpu::count_slots(network_view_, state.plan.data(), routing_input(input), num_tokens,
                       beside->stream());
      hosts_->list_tokens(state.plan.data(), num_tokens, beside->stream());
      hosts_->publish_counts(state.plan.data(), num_tokens, beside->stream());
      gpu::stage_forward(view_, rows_input(input.x), num_tokens, stream);
      wait_for_counts();
      hosts_->take_counts();
    });
    throw_if_over();  // a call before this one may have failed meanwhile
  }
  hosts_->entry().exchange(header, config_.entry_deadline_s);
  auto& state = static_cast<CudaCallState&>(*call_state);
  hosts_->read_counts(state);
  state.num_tokens = num_tokens;
  state.stream = stream;
  state.rows_known = false;
  state.call_number = workspace_.num_calls++;
  enqueue_over_hosts(*turn, stream, [&](CallOrder& order) {
    enqueue_forward_over_hosts(state, input, output, order, stream, *beside);
  });
}

void CudaBackend::backward_over_hosts(const CudaCallState* state, const BackwardInput& input,
                                      const BackwardOutput& output, cudaStream_t stream) {
  throw_if_over();
  CallHeader header{megamoe::CallKind::backward,
                    workspace_.group_id,
                    layer_number_,
                    state == nullptr ? -1 : state->call_number,
                    {}};
  header.outcome = outcome_of([&] {
    check_over_hosts(stream);
    if (state == nullptr) {
      throw Error(ErrorCode::invalid_argument,
                  "context is not of a forward call of this layer (empty, or another layer's)");
    }
    validate_backward(expected_, state->num_tokens, input, output);
    check_backward_memory(memory_.device, input, output);
  });
  hosts_->entry().exchange(header, config_.entry_deadline_s);
  const StreamOrder::Turn turn(memory_.calls->order, stream);
  enqueue_over_hosts(turn, stream, [&](CallOrder& order) {
    memory_.stages.start("stage_and_plan", stream);
    SideStream::Fork beside(memory_.side, stream);
    enqueue_backward_over_hosts(*state, input, output, order, stream, beside);
  });
}

products::LaunchOptions CudaBackend::launch_beside_transfers(std::int64_t num_tokens,
                                                             cudaStream_t stream) {
  products::LaunchOptions launch = launch_options(num_tokens, stream);
  if (hosts_->num_groups() == 1) return launch;
  launch.ends = nullptr;  // a product's launches would mix theirs
  // Products run in clusters of two.
  const int left_over = gpu::num_multiprocessors() - (hosts_->link().num_sms() + 1) / 2 * 2;
  if (launch.num_sms == 0 && hosts_->link().num_sms() > 0) launch.num_sms = std::max(2, left_over);
  return launch;
}

void CudaBackend::announce_results(std::int32_t group, cudaStream_t stream) {
  gpu::announce_group(view_, hosts_->host_view(), GroupSignal::results_sent, group, stream);
  cuda::check(cudaEventRecord(hosts_->results_sent[group], stream), "cudaEventRecord");
}

void CudaBackend::group_by_group(gpu::CallKind kind, const CudaCallState& state, CallOrder& order,
                                 cudaStream_t stream, SideStream::Fork& beside,
                                 const std::function<void(std::int32_t group)>& compute) {
  Hosts& hosts = *hosts_;
  const cudaStream_t network = beside.stream();
  std::byte* plan = state.plan.data();
  memory_.network_stages.start("routing", network);
  gpu::enter_agreed_call(network_view_, plan,
                         kind == gpu::CallKind::forward ? hosts.pinned_counts_RE() : nullptr,
                         state.num_tokens, network);
  gpu::write_pull_lists(network_view_, plan, state.num_tokens, network);
  hosts.exchange_routing(kind, plan, network);
  wait_for_stream(stream, network, hosts.listed());
  memory_.stages.start("meet_rows", stream);
  if (order.is_shared()) {
    gpu::announce_on_host(view_, hosts.host_view(), Signal::rows_staged, stream);
    order.meet(Signal::rows_staged);
  }
  gpu::meet_on_host(view_after(order, view_), hosts.host_view(), plan, Signal::rows_staged, stream);

  const auto send_rows = [&](std::int32_t group) {
    memory_.network_stages.start("rows", network);
    hosts.exchange_rows(kind, group, network);
    gpu::announce_group(network_view_, hosts.host_view(), GroupSignal::rows_arrived, group,
                        network);
    cuda::check(cudaEventRecord(hosts.rows_arrived[group], network), "cudaEventRecord");
  };
  memory_.network_stages.start("await_rows", network);
  cuda::check(cudaStreamWaitEvent(network, hosts.staged(), 0), "cudaStreamWaitEvent");
  send_rows(0);
  for (std::int32_t group = 0; group < hosts.num_groups(); ++group) {
    if (group + 1 < hosts.num_groups()) send_rows(group + 1);
    if (group == 0) {
      memory_.network_stages.start("lists", network);
      hosts.list_slots(plan, network);
    }
    memory_.stages.start("await_rows", stream);
    cuda::check(cudaStreamWaitEvent(stream, hosts.rows_arrived[group], 0), "cudaStreamWaitEvent");
    order.meet_next();
    gpu::await_group(view_after(order, view_), hosts.host_view(), plan, GroupSignal::rows_arrived,
                     group, stream);
    compute(group);
    memory_.network_stages.start("await_results", network);
    cuda::check(cudaStreamWaitEvent(network, hosts.results_sent[group], 0), "cudaStreamWaitEvent");
    order.meet_next();
    gpu::await_group(view_after(order, network_view_), hosts.host_view(), nullptr,
                     GroupSignal::results_sent, group, network);
    memory_.network_stages.start("results", network);
    hosts.return_results(kind, group, network);
  }
  memory_.network_stages.start(StageClock::kEnd, network);
  memory_.stages.start("await_results", stream);
  beside.join();
}

void CudaBackend::enqueue_forward_over_hosts(CudaCallState& state, const ForwardInput& input,
                                             const ForwardOutput& output, CallOrder& order,
                                             cudaStream_t stream, SideStream::Fork& beside) {
  std::byte* plan = state.plan.data();
  const ExpertWeights all_experts = with_plain_strides(input.experts);
  const products::LaunchOptions launch = launch_beside_transfers(state.num_tokens, stream);
  const TensorView g = kept_tensor(state.saved_g);
  const TensorView u = kept_tensor(state.saved_u);
  const gpu::PulledRows pulled{rows_of(rows_.x_CH), nullptr, nullptr, rows_.origin_C};

  cuda::check(cudaEventRecord(hosts_->staged(), stream), "cudaEventRecord");
  hosts_->begin(state, order);
  group_by_group(gpu::CallKind::forward, state, order, stream, beside, [&](std::int32_t group) {
    const ExpertRange range = hosts_->experts_of(group);
    const products::GroupedRows rows = of_experts(all_rows(plan), range);
    const ExpertWeights experts = of_experts(all_experts, range);
    memory_.stages.start("pull", stream);
    gpu::pull_rows_of(view_, plan, range, pulled, stream);
    memory_.stages.start("gate_up", stream);
    products::multiply_gate_up(rows, config_.activation, rows_.x_CH, experts.gate, experts.up, g, u,
                               rows_.a_CI, launch);
    memory_.stages.start("down", stream);
    products::multiply_down(rows, rows_.a_CI, experts.down, rows_.dy_CH, launch);
    memory_.stages.start("push", stream);
    gpu::push_rows_of(view_, plan, range, rows_of(rows_.dy_CH), rows_.origin_C, {}, stream);
    announce_results(group, stream);
  });
  memory_.stages.start("reduce", stream);
  gpu::reduce_outputs(view_, plan, rows_output(output.y), state.num_tokens, stream);
  memory_.stages.start(StageClock::kEnd, stream);
}

/// dg, du and w a of some experts: where g and u are kept, from them, else from g and u that are
/// computed again.
void CudaBackend::gradient_of_group(const CudaCallState& state, const ExpertRange& experts,
                                    const BackwardInput& input,
                                    const products::LaunchOptions& launch) {
  std::byte* plan = state.plan.data();
  if (saved_rows_ == 0) {
    gradient_of_unsaved(of_experts(all_rows(plan), experts), input, launch);
    return;
  }
  const bool all_saved = saved_rows_ == padded_rows_;
  gradient_of(of_experts(all_saved ? all_rows(plan) : kept_rows(plan), experts),
              kept_tensor(state.saved_g), kept_tensor(state.saved_u), input, launch);
  if (all_saved) return;
  products::LaunchOptions unmeasured = launch;
  unmeasured.ends = nullptr;
  gradient_of_unsaved(of_experts(other_rows(plan), experts), input, unmeasured);
}

void CudaBackend::enqueue_backward_over_hosts(const CudaCallState& state,
                                              const BackwardInput& input,
                                              const BackwardOutput& output, CallOrder& order,
                                              cudaStream_t stream, SideStream::Fork& beside) {
  const std::int64_t num_tokens = state.num_tokens;
  std::byte* plan = state.plan.data();
  const products::LaunchOptions launch = launch_beside_transfers(num_tokens, stream);
  const ExpertWeights all_experts = with_plain_strides(input.experts);
  const gpu::PulledRows pulled{rows_of(rows_.x_CH), rows_of(rows_.dy_CH), rows_.weight_C,
                               rows_.origin_C};
  const gpu::DweightSegments segments{
      rows_.dweight_segments, padded_rows_,
      static_cast<std::int32_t>(num_dweight_segments(dims_.intermediate_dim))};

  gpu::count_planned_slots(network_view_, plan, num_tokens, beside.stream());
  hosts_->list_tokens(plan, num_tokens, beside.stream());
  gpu::stage_backward(view_, plan, rows_input(input.x), rows_input(input.dy), num_tokens, stream);
  cuda::check(cudaEventRecord(hosts_->staged(), stream), "cudaEventRecord");
  hosts_->begin(state, order);
  bool is_split = saved_rows_ == 0 || saved_rows_ == padded_rows_;
  group_by_group(gpu::CallKind::backward, state, order, stream, beside, [&](std::int32_t group) {
    const ExpertRange range = hosts_->experts_of(group);
    const products::GroupedRows rows = of_experts(all_rows(plan), range);
    BackwardInput in = input;
    in.experts = of_experts(all_experts, range);
    if (!is_split) gpu::split_groups(view_, plan, saved_rows_, stream);
    is_split = true;
    memory_.stages.start("pull", stream);
    gpu::pull_rows_of(view_, plan, range, pulled, stream);
    gradient_of_group(state, range, in, launch);

    auto jobs = gradient_jobs(output.experts);
    for (products::WeightGradient& job : jobs)
      job.gradient_eRC = of_experts(job.gradient_eRC, range);
    const std::span<const products::WeightGradient> gradients(jobs.data(), num_gradient_jobs());
    const auto multiply = [&](std::span<const products::WeightGradient> some) {
      memory_.stages.start("weight_gradients", stream);
      products::multiply_weight_gradients(
          rows, some, gradient_mode(), launch, &view_.control()->call_failed,
          view_.num_tiles_taken(device::ProductKind::weight_gradients));
    };
    // The first has read dy: dx takes its place, and travels beside the others.
    multiply(gradients.first(1));
    memory_.stages.start("dx", stream);
    products::multiply_dx(rows, rows_.dg_CI, rows_.du_CI, in.experts.gate, in.experts.up,
                          rows_.dy_CH, launch);
    memory_.stages.start("push", stream);
    gpu::push_rows_of(view_, plan, range, rows_of(rows_.dy_CH), rows_.origin_C, segments, stream);
    announce_results(group, stream);
    multiply(gradients.subspan(1));
  });
  memory_.stages.start("reduce", stream);
  gpu::reduce_gradients(view_, plan, rows_output(output.dx), dweights_output(output.dweights),
                        num_tokens, stream);
  memory_.stages.start(StageClock::kEnd, stream);
}

}  // namespace megamoe::cuda
