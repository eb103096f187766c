#include "cpu/backend.h"

#include <cstring>
#include <string>

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
      counts_E_(config.shape.num_experts),
      crossing_S_(relay_.num_hosts()),
      entry_(sizeof(CallHeader) + (counts_E_.size() + crossing_S_.size()) * sizeof(std::int32_t)),
      entries_R_(entry_.size() * group_.size()) {}

std::unique_ptr<CallState> CpuBackend::new_call_state() const {
  return std::make_unique<CpuCallState>(dims_, relay_.num_hosts(),
                                        resolved_saved_row_capacity(config_, group_.size()),
                                        expected_.gated);
}

StageContext CpuBackend::stage_context() {
  return {dims_, config_.activation, buffers_, memory_.threads, memory_.scratch};
}

void CpuBackend::barrier(const char* what) { group_.barrier(what, config_.inner_deadline_s); }

/// Exchanges headers and counts. Also separates calls: a rank comes here only after it has read
/// everything that its peers staged for the call before.
void CpuBackend::enter(const CallHeader& mine) {
  std::memcpy(entry_.data(), &mine, sizeof(mine));
  std::byte* const counts = entry_.data() + sizeof(mine);
  std::memcpy(counts, counts_E_.data(), counts_E_.size() * sizeof(std::int32_t));
  std::memcpy(counts + counts_E_.size() * sizeof(std::int32_t), crossing_S_.data(),
              crossing_S_.size() * sizeof(std::int32_t));
  const char* what = mine.kind == CallKind::forward ? "the entry into MoeLayer::forward"
                                                    : "the entry into MoeLayer::backward";
  group_.all_gather(entry_.data(), entries_R_.data(), entry_.size(), what,
                    config_.entry_deadline_s);
  check_headers();
}

void CpuBackend::check_headers() {
  const auto header_of = [&](int rank) {
    CallHeader header;
    std::memcpy(&header, entries_R_.data() + rank * entry_.size(), sizeof(header));
    return header;
  };
  const auto text = [](const CallHeader& header) {
    std::string call = header.kind == CallKind::forward
                           ? "forward"
                           : "backward of call " + std::to_string(header.forward_number);
    return call + " of layer " + std::to_string(header.layer_number);
  };
  for (int rank = 0; rank < group_.size(); ++rank) {
    throw_if_failed(header_of(rank).outcome, rank, group_.rank());
  }
  const CallHeader first = header_of(0);
  for (int rank = 1; rank < group_.size(); ++rank) {
    const CallHeader other = header_of(rank);
    if (other.workspace_id != first.workspace_id) {
      throw Error(ErrorCode::config_mismatch, "ranks make different calls: rank 0 " + text(first) +
                                                  ", rank " + std::to_string(rank) + " " +
                                                  text(other) + " of another workspace");
    }
    if (other.kind != first.kind || other.layer_number != first.layer_number ||
        other.forward_number != first.forward_number) {
      throw Error(ErrorCode::config_mismatch, "ranks make different calls: rank 0 " + text(first) +
                                                  ", rank " + std::to_string(rank) + " " +
                                                  text(other));
    }
  }
}

/// Copies ids and weights into the state and counts the slots of every expert.
void CpuBackend::read_routing(CpuCallState& state, const ForwardInput& input,
                              std::int64_t num_tokens) {
  const auto* ids = static_cast<const std::int32_t*>(input.expert_ids.data);
  const auto* weights = static_cast<const float*>(input.weights.data);
  const std::int64_t top_k = dims_.routing.top_k;
  const IdFault fault =
      count_slots(dims_.routing, ids, num_tokens, input.expert_ids.strides[0], counts_E_.data());
  if (fault.found()) {
    throw Error(ErrorCode::expert_id_out_of_range,
                "expert_ids[" + std::to_string(fault.token) + ", " + std::to_string(fault.slot) +
                    "] is " + std::to_string(fault.value) + ", must be -1 or from 0 to " +
                    std::to_string(dims_.routing.num_experts - 1));
  }
  state.num_tokens = num_tokens;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    std::copy_n(ids + token * input.expert_ids.strides[0], top_k,
                state.ids_TK.data() + token * top_k);
    std::copy_n(weights + token * input.weights.strides[0], top_k,
                state.weights_TK.data() + token * top_k);
  }
  relay_.count_tokens({state.ids_TK.data(), static_cast<std::size_t>(num_tokens * top_k)},
                      crossing_S_.data());
}

/// From everybody's counts: capacity, then the offsets of this rank's experts.
void CpuBackend::plan_rows(CpuCallState& state) {
  const std::size_t counts_bytes = counts_E_.size() * sizeof(std::int32_t);
  for (int rank = 0; rank < group_.size(); ++rank) {
    const std::byte* counts = entries_R_.data() + rank * entry_.size() + sizeof(CallHeader);
    std::memcpy(state.counts_RE.data() + rank * counts_E_.size(), counts, counts_bytes);
    std::memcpy(state.crossing_RS.data() + rank * crossing_S_.size(), counts + counts_bytes,
                crossing_S_.size() * sizeof(std::int32_t));
  }
  for (int rank = 0; rank < group_.size(); ++rank) {
    const std::int64_t need = rows_received(dims_.routing, state.counts_RE.data(), rank);
    if (need > dims_.row_capacity) {
      throw Error(ErrorCode::capacity_exceeded,
                  "rank " + std::to_string(rank) + " would receive " + std::to_string(need) +
                      " rows; its capacity is " + std::to_string(dims_.row_capacity) +
                      " (LayerConfig::row_capacity)");
    }
  }
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
  std::fill(counts_E_.begin(), counts_E_.end(), 0);
  header.outcome = outcome_of([&] {
    const std::int64_t num_tokens = validate_forward(expected_, input, output);
    if (call_state == nullptr) call_state = new_call_state();
    read_routing(static_cast<CpuCallState&>(*call_state), input, num_tokens);
  });
  enter(header);
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
  enter(header);
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
