#include "megamoe/router.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <stdexcept>
#include <string>

#include "base/tensor_check.h"
#include "megamoe/error.h"
#include "routing/router_check.h"
#include "routing/router_product.h"
#include "routing/router_select.h"
#include "routing/router_token.h"

namespace megamoe {
namespace {

/// Sets the size; memory is only ever added.
template <class T>
void set_size(std::vector<T>& buffer, std::int64_t elements, const char* name) {
  try {
    buffer.resize(static_cast<std::size_t>(elements));
  } catch (const std::exception&) {  // bad_alloc, or length_error beyond max_size
    throw Error(ErrorCode::out_of_memory, std::string(name) + " needs " + std::to_string(elements) +
                                              " elements of " + std::to_string(sizeof(T)) +
                                              " bytes");
  }
}

/// Row `row` of a contiguous matrix.
template <class T>
std::span<T> row_span(std::vector<T>& matrix, std::int64_t row, std::int64_t width) {
  return std::span<T>(matrix).subspan(static_cast<std::size_t>(row * width),
                                      static_cast<std::size_t>(width));
}
template <class T>
std::span<const T> row_span(const std::vector<T>& matrix, std::int64_t row, std::int64_t width) {
  return std::span<const T>(matrix).subspan(static_cast<std::size_t>(row * width),
                                            static_cast<std::size_t>(width));
}

}  // namespace

ConstTensorView RouterContext::scores() const {
  return tensor_view(scores_TE_.data(), {num_tokens_, config_.num_experts});
}

ConstTensorView RouterContext::expert_ids() const {
  return tensor_view(expert_ids_TK_.data(), {num_tokens_, num_slots_});
}

Router::Router(const RouterConfig& config) : config_(config) {
  detail::check_router_config(config);
  set_size(logits_E_, config.num_experts, "logits_E");
  set_size(choice_E_, config.num_experts, "choice_E");
  set_size(group_scores_G_, config.num_groups, "group_scores_G");
  set_size(aux_slopes_E_, config.num_experts, "aux_slopes_E");
}

void Router::forward(const RouterInputs& inputs, const RouterOutputs& outputs,
                     RouterContext& context) {
  context.ready_ = false;
  const detail::RouterCallShape shape = detail::check_forward(config_, inputs, outputs);
  context.config_ = config_;
  context.num_tokens_ = shape.num_tokens;
  context.num_slots_ = shape.num_slots;
  set_size(context.scores_TE_, shape.num_tokens * config_.num_experts, "context scores");
  set_size(context.expert_ids_TK_, shape.num_tokens * shape.num_slots, "context expert ids");
  set_size(context.shares_TK_, shape.num_tokens * shape.num_slots, "context shares");
  load_logits(inputs, shape.num_tokens, context.scores_TE_.data());
  detail::check_logits_finite(context.scores_TE_.data(), shape.num_tokens, config_.num_experts);
  route_tokens(inputs, outputs, context);
  context.ready_ = true;
}

void Router::load_logits(const RouterInputs& inputs, std::int64_t num_tokens, float* logits_TE) {
  const std::int64_t experts = config_.num_experts;
  if (inputs.logits.absent()) {
    set_size(router_weight_HE_, inputs.x.sizes[1] * experts, "router_weight_HE");
    detail::transpose_router_weight(inputs.router_weight, router_weight_HE_.data());
    detail::logits_product(inputs.x, router_weight_HE_.data(), experts, logits_TE);
    return;
  }
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    float* row_E = logits_TE + t * experts;
    if (inputs.logits.dtype == DType::bf16) {
      const auto* source = detail::row_of<bf16>(inputs.logits, t);
      std::transform(source, source + experts, row_E, [](bf16 value) { return to_float(value); });
    } else {
      const auto* source = detail::row_of<float>(inputs.logits, t);
      std::copy(source, source + experts, row_E);
    }
  }
}

/// The context's scores hold the logits on entry.
void Router::route_tokens(const RouterInputs& inputs, const RouterOutputs& outputs,
                          RouterContext& context) {
  const std::int64_t experts = config_.num_experts;
  const std::int64_t slots = context.num_slots_;
  const std::span<const float> bias_E(
      static_cast<const float*>(inputs.selection_bias.data),
      inputs.selection_bias.absent() ? 0 : static_cast<std::size_t>(experts));
  for (std::int64_t t = 0; t < context.num_tokens_; ++t) {
    const std::span<float> scores_E = row_span(context.scores_TE_, t, experts);
    const std::span<std::int32_t> ids_K = row_span(context.expert_ids_TK_, t, slots);
    const std::span<float> shares_K = row_span(context.shares_TK_, t, slots);
    std::ranges::copy(scores_E, logits_E_.begin());
    detail::compute_scores<float>(config_.score_function, logits_E_, scores_E);
    if (inputs.forced_ids.absent()) {
      detail::select_experts<float>(config_, scores_E, bias_E, choice_E_, group_scores_G_, ids_K);
    } else {
      const auto* forced = detail::row_of<std::int32_t>(inputs.forced_ids, t);
      std::copy(forced, forced + slots, ids_K.begin());
    }
    detail::compute_shares<float>(config_, logits_E_, scores_E, ids_K, shares_K);
    std::ranges::copy(ids_K, detail::row_of<std::int32_t>(outputs.expert_ids, t));
    std::ranges::transform(shares_K, detail::row_of<float>(outputs.weights, t),
                           [&](float share) { return config_.scale * share; });
  }
}

void Router::backward(const RouterContext& context, const RouterBackwardInputs& inputs,
                      const RouterBackwardOutputs& outputs) {
  detail::check_backward(config_, context, inputs, outputs);
  TensorView d_logits = outputs.d_logits;
  if (d_logits.absent()) {
    set_size(d_logits_TE_, context.num_tokens_ * config_.num_experts, "d_logits_TE");
    d_logits = tensor_view(d_logits_TE_.data(), {context.num_tokens_, config_.num_experts});
  }
  logit_gradients(context, inputs, d_logits);
  if (!outputs.d_x.absent()) {
    set_size(row_H_, outputs.d_x.sizes[1], "row_H");
    detail::d_x_product(d_logits, inputs.router_weight, outputs.d_x_write, row_H_.data(),
                        outputs.d_x);
  }
  if (!outputs.d_router_weight.absent()) {
    set_size(row_H_, outputs.d_router_weight.sizes[1], "row_H");
    detail::d_router_weight_product(d_logits, inputs.x, outputs.d_router_weight_write,
                                    row_H_.data(), outputs.d_router_weight);
  }
}

void Router::logit_gradients(const RouterContext& context, const RouterBackwardInputs& inputs,
                             const TensorView& d_logits) {
  const std::int64_t experts = config_.num_experts;
  const std::int64_t slots = context.num_slots_;
  std::span<const float> slopes_E;
  if (config_.aux_loss_alpha != 0.0F) {
    detail::compute_aux_slopes<float>(config_, *inputs.global_load,
                                      static_cast<double>(inputs.d_aux_loss), aux_slopes_E_);
    slopes_E = aux_slopes_E_;
  }
  for (std::int64_t t = 0; t < context.num_tokens_; ++t) {
    const detail::RoutedToken<float> token{row_span(context.scores_TE_, t, experts),
                                           row_span(context.expert_ids_TK_, t, slots),
                                           row_span(context.shares_TK_, t, slots)};
    const std::span<const float> d_weights_K(detail::row_of<float>(inputs.d_weights, t),
                                             static_cast<std::size_t>(slots));
    const std::span<float> d_logits_E(detail::row_of<float>(d_logits, t),
                                      static_cast<std::size_t>(experts));
    detail::token_backward<float>(config_, token, d_weights_K, slopes_E, d_logits_E);
  }
}

}  // namespace megamoe
