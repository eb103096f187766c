#include "cpu/backend.h"

#include <algorithm>
#include <span>

#include "cpu/exchange.h"

namespace megamoe::cpu {
namespace {

/// Once data moves, a failure of this rank is one of the group: peers must not wait for it.
template <class Work>
void or_abort(Communicator& group, Work&& work) {
  try {
    work();
  } catch (const std::exception& error) {
    group.abort(error.what());
    throw;
  }
}

}  // namespace

CpuBackend::CpuBackend(const LayerConfig& config, Workspace::Impl& workspace)
    : config_(config),
      workspace_(workspace),
      group_(workspace.communicator),
      dims_(workspace_dims(config, group_.size())),
      expected_(expected_shape(config, group_.size())),
      memory_(static_cast<CpuWorkspace&>(*workspace.memory)),
      relay_(dims_, group_, memory_.local.get()),
      buffers_(make_buffers(dims_, group_.topology(), *workspace.symmetric, memory_.local.get(),
                            group_.rank())),
      layer_number_(workspace.num_layers_built++),
      entry_(group_, config.shape.num_experts + relay_.num_hosts()) {}

std::unique_ptr<CallState> CpuBackend::new_call_state() const {
  return std::make_unique<CpuCallState>(dims_, relay_.num_hosts(),
                                        resolved_saved_row_capacity(config_, group_.size()),
                                        expected_.gated);
}

StageContext CpuBackend::stage_context() {
  return {dims_, config_.activation, buffers_, memory_.threads, memory_.scratch};
}

void CpuBackend::barrier(const char* what) { group_.barrier(what, config_.inner_deadline_s); }

/// Copies ids and weights into the state and counts the slots of every expert.
void CpuBackend::read_routing(CpuCallState& state, const ForwardInput& input,
                              std::int64_t num_tokens) {
  const auto* ids = static_cast<const std::int32_t*>(input.expert_ids.data);
  const auto* weights = static_cast<const float*>(input.weights.data);
  const std::int64_t top_k = dims_.routing.top_k;
  const std::span<std::int32_t> counts = entry_.counts();
  throw_if_found(
      count_slots(dims_.routing, ids, num_tokens, input.expert_ids.strides[0], counts.data()),
      dims_.routing);
  state.num_tokens = num_tokens;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    std::copy_n(ids + token * input.expert_ids.strides[0], top_k,
                state.ids_TK.data() + token * top_k);
    std::copy_n(weights + token * input.weights.strides[0], top_k,
                state.weights_TK.data() + token * top_k);
  }
  relay_.count_tokens({state.ids_TK.data(), static_cast<std::size_t>(num_tokens * top_k)},
                      counts.data() + dims_.routing.num_experts);
}

/// From everybody's counts: capacity, then the offsets of this rank's experts.
void CpuBackend::plan_rows(CpuCallState& state) {
  const std::size_t num_experts = dims_.routing.num_experts;
  const std::size_t num_hosts = relay_.num_hosts();
  for (int rank = 0; rank < group_.size(); ++rank) {
    entry_.read_counts(rank, 0,
                       std::span(state.counts_RE).subspan(rank * num_experts, num_experts));
    entry_.read_counts(rank, num_experts,
                       std::span(state.crossing_RS).subspan(rank * num_hosts, num_hosts));
  }
  check_row_capacity(dims_, state.counts_RE.data());
  expert_offsets(dims_.routing, state.counts_RE.data(), group_.rank(), kRowAlignment,
                 state.expert_begin.data());
  const std::int32_t first = dims_.routing.first_expert_of(group_.rank());
  for (std::int32_t i = 0; i < dims_.routing.experts_per_rank(); ++i) {
    state.rows_e[i] = rows_of_expert(dims_.routing, state.counts_RE.data(), first + i);
  }
}

void CpuBackend::forward(std::unique_ptr<CallState>& call_state, const ForwardInput& input,
                         const ForwardOutput& output, Stream /*stream*/) {
  const Occupied occupied(workspace_.in_use);
  CallHeader header{CallKind::forward, workspace_.group_id, layer_number_, -1, {}};
  std::ranges::fill(entry_.counts(), 0);
  header.outcome = outcome_of([&] {
    const std::int64_t num_tokens = validate_forward(expected_, input, output);
    if (call_state == nullptr) call_state = new_call_state();
    read_routing(static_cast<CpuCallState&>(*call_state), input, num_tokens);
  });
  entry_.exchange(header, config_.entry_deadline_s);
  auto& state = static_cast<CpuCallState&>(*call_state);
  plan_rows(state);
  state.call_number = workspace_.num_calls++;

  or_abort(group_, [&] {
    const StageContext stage = stage_context();
    stage_rows(stage, input.x, buffers_.mine().staged_rows_TH);
    stage_pull_lists(stage, state, memory_.plan_scratch);
    relay_.send_forward(stage, state, memory_.plan_scratch, config_.inner_deadline_s);
    barrier("staged tokens");
    fetch_forward(stage);
    gate_up_products(stage, state, input.experts);
    down_products(stage, state, input.experts);
    barrier("expert outputs");
    relay_.return_forward(stage, config_.inner_deadline_s);
    reduce_outputs(stage, state, output.y);
  });
}

void CpuBackend::backward(const CallState* call_state, const BackwardInput& input,
                          const BackwardOutput& output, Stream /*stream*/) {
  const Occupied occupied(workspace_.in_use);
  const auto* own_state = static_cast<const CpuCallState*>(call_state);
  CallHeader header{CallKind::backward,
                    workspace_.group_id,
                    layer_number_,
                    own_state == nullptr ? -1 : own_state->call_number,
                    {}};
  header.outcome = outcome_of([&] {
    if (own_state == nullptr) {
      throw Error(ErrorCode::invalid_argument,
                  "context is not of a forward call of this layer (empty, or another layer's)");
    }
    validate_backward(expected_, own_state->num_tokens, input, output);
  });
  entry_.exchange(header, config_.entry_deadline_s);
  const CpuCallState& state = *own_state;

  or_abort(group_, [&] {
    const StageContext stage = stage_context();
    stage_rows(stage, input.x, buffers_.mine().staged_rows_TH);
    stage_rows(stage, input.dy, buffers_.mine().staged_dy_TH);
    stage_weights(stage, state);
    stage_pull_lists(stage, state, memory_.plan_scratch);
    relay_.send_backward(stage, state, memory_.plan_scratch, config_.inner_deadline_s);
    barrier("staged gradients");
    fetch_backward(stage);
    p_products(stage, state, input.experts);
    dx_products(stage, state, input.experts);
    weight_gradients(stage, state, config_.weight_gradient_mode, output.experts);
    barrier("activation gradients");
    relay_.return_backward(stage, config_.inner_deadline_s);
    reduce_gradients(stage, state, output.dx, output.dweights);
  });
}

/// Nothing is asynchronous here.
void CpuBackend::check(Stream /*stream*/) {}

}  // namespace megamoe::cpu
