// What the router refuses, and that each refusal names the argument.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "megamoe/error.h"
#include "megamoe/router.h"
#include "router_fixture.h"

namespace megamoe {
namespace {

using Action = std::function<void()>;

void expect_refused(const Action& action, const std::string& named,
                    ErrorCode code = ErrorCode::invalid_argument) {
  try {
    action();
    ADD_FAILURE() << "not refused: " << named;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(named), std::string::npos)
        << "'" << error.what() << "' does not have '" << named << "'";
  }
}

RouterConfig small_config() {
  RouterConfig config;
  config.num_experts = 6;
  config.top_k = 2;
  config.num_groups = 3;
  config.top_groups = 2;
  return config;
}

TEST(RouterArguments, Configuration) {
  const auto refused = [](const std::string& name, const std::function<void(RouterConfig&)>& edit) {
    RouterConfig config = small_config();
    edit(config);
    expect_refused([&] { Router{config}; }, name);
  };
  EXPECT_NO_THROW(Router{small_config()});
  refused("num_experts", [](RouterConfig& c) { c.num_experts = 0; });
  refused("num_experts", [](RouterConfig& c) { c.num_experts = std::int64_t{1} << 31; });
  refused("top_k", [](RouterConfig& c) { c.top_k = 0; });
  refused("top_k", [](RouterConfig& c) { c.top_k = 7; });
  refused("num_groups", [](RouterConfig& c) { c.num_groups = 4; });
  refused("num_groups", [](RouterConfig& c) { c.num_groups = 0; });
  refused("num_groups", [](RouterConfig& c) { c.num_groups = 12; });
  refused("top_groups", [](RouterConfig& c) { c.top_groups = 0; });
  refused("top_groups", [](RouterConfig& c) { c.top_groups = 4; });
  refused("top_groups = 2 leaves 4", [](RouterConfig& c) { c.top_k = 5; });
  refused("scale", [](RouterConfig& c) { c.scale = 0; });
  refused("scale", [](RouterConfig& c) { c.scale = std::nanf(""); });
  refused("aux_loss_alpha", [](RouterConfig& c) { c.aux_loss_alpha = -1; });
  refused("score_function", [](RouterConfig& c) { c.score_function = ScoreFunction{7}; });
  refused("weight_norm", [](RouterConfig& c) { c.weight_norm = WeightNorm{7}; });
}

/// A valid call of every kind, to be spoilt in one place at a time.
class RouterCall : public ::testing::Test {
 protected:
  static constexpr std::int64_t kTokens = 3;
  static constexpr std::int64_t kHidden = 4;
  static constexpr std::int64_t kExperts = 6;

  RouterCall() {
    outputs_ = {tensor_view(ids_.data(), {kTokens, 2}), tensor_view(weights_.data(), {kTokens, 2})};
    from_logits_.logits = tensor_view(logits_.data(), {kTokens, kExperts});
    from_x_.x = tensor_view(x_.data(), {kTokens, kHidden});
    from_x_.router_weight = tensor_view(router_weight_.data(), {kExperts, kHidden});
    backward_inputs_.d_weights = tensor_view(weights_.data(), {kTokens, 2});
    backward_inputs_.x = from_x_.x;
    backward_inputs_.router_weight = from_x_.router_weight;
    backward_outputs_.d_logits = tensor_view(d_logits_.data(), {kTokens, kExperts});
    backward_outputs_.d_x = tensor_view(d_x_.data(), {kTokens, kHidden});
    backward_outputs_.d_router_weight = tensor_view(d_router_weight_.data(), {kExperts, kHidden});
  }

  void forward(const RouterInputs& inputs) { router_.forward(inputs, outputs_, context_); }

  void forward_refused(const std::string& named, RouterInputs inputs,
                       const std::function<void(RouterInputs&)>& edit,
                       ErrorCode code = ErrorCode::invalid_argument) {
    edit(inputs);
    ids_.assign(ids_.size(), -7);
    weights_.assign(weights_.size(), -7.0F);
    expect_refused([&] { forward(inputs); }, named, code);
    EXPECT_FALSE(context_.ready());
    EXPECT_EQ(ids_, std::vector<std::int32_t>(ids_.size(), -7));
    EXPECT_EQ(weights_, std::vector<float>(weights_.size(), -7.0F));
  }

  void backward_refused(
      const std::string& named,
      const std::function<void(RouterBackwardInputs&, RouterBackwardOutputs&)>& edit) {
    RouterBackwardInputs inputs = backward_inputs_;
    RouterBackwardOutputs outputs = backward_outputs_;
    edit(inputs, outputs);
    expect_refused([&] { router_.backward(context_, inputs, outputs); }, named);
  }

  Router router_{small_config()};
  RouterContext context_;
  std::vector<float> logits_ = std::vector<float>(kTokens * kExperts, 0.5F);
  std::vector<bf16> x_ = std::vector<bf16>(kTokens * kHidden, to_bf16(1.0F));
  std::vector<float> router_weight_ = std::vector<float>(kExperts * kHidden, 0.5F);
  std::vector<float> bias_ = std::vector<float>(kExperts, 0.0F);
  std::vector<std::int32_t> forced_ = std::vector<std::int32_t>(kTokens * 2, 1);
  std::vector<std::int32_t> ids_ = std::vector<std::int32_t>(kTokens * 2);
  std::vector<float> weights_ = std::vector<float>(kTokens * 2);
  std::vector<float> d_logits_ = std::vector<float>(kTokens * kExperts);
  std::vector<float> d_x_ = std::vector<float>(kTokens * kHidden);
  std::vector<float> d_router_weight_ = std::vector<float>(kExperts * kHidden);
  RouterOutputs outputs_;
  RouterInputs from_logits_;
  RouterInputs from_x_;
  RouterBackwardInputs backward_inputs_;
  RouterBackwardOutputs backward_outputs_;
};

TEST_F(RouterCall, ForwardInputs) {
  EXPECT_NO_THROW(forward(from_logits_));
  EXPECT_NO_THROW(forward(from_x_));
  forward_refused("x is absent", {}, [](RouterInputs&) {});
  forward_refused("x must be absent", from_logits_, [&](RouterInputs& in) { in.x = from_x_.x; });
  forward_refused("router_weight must be absent", from_logits_,
                  [&](RouterInputs& in) { in.router_weight = from_x_.router_weight; });
  forward_refused("router_weight is absent", from_x_,
                  [](RouterInputs& in) { in.router_weight = {}; });
  forward_refused(
      "x is fp16, which is not supported yet", from_x_,
      [](RouterInputs& in) { in.x.dtype = DType::fp16; }, ErrorCode::unsupported);
  forward_refused("x must be bf16", from_x_, [](RouterInputs& in) { in.x.dtype = DType::fp32; });
  forward_refused("x must have contiguous columns", from_x_, [](RouterInputs& in) {
    in.x.strides = {1, kTokens};
  });
  forward_refused("x has a negative stride", from_x_,
                  [](RouterInputs& in) { in.x.strides[0] = -kHidden; });
  for (const std::int64_t stride : {std::int64_t{1} << 62, std::int64_t{1} << 61}) {
    forward_refused("x spans more than 64 bits", from_x_,
                    [&](RouterInputs& in) { in.x.strides[0] = stride; });
  }
  forward_refused("x has no data", from_x_, [](RouterInputs& in) { in.x.data = nullptr; });
  forward_refused("x must have at least one hidden", from_x_,
                  [](RouterInputs& in) { in.x.sizes[1] = 0; });
  forward_refused("router_weight must have shape [6, 4]", from_x_,
                  [](RouterInputs& in) { in.router_weight.sizes[1] = 3; });
  forward_refused("router_weight must be fp32 or bf16, is fp64", from_x_,
                  [](RouterInputs& in) { in.router_weight.dtype = DType::fp64; });
  forward_refused("logits must have shape [any, 6], is fp32 [3, 5]", from_logits_,
                  [](RouterInputs& in) { in.logits.sizes[1] = 5; });
  forward_refused("logits must have shape", from_logits_,
                  [](RouterInputs& in) { in.logits.num_dims = 1; });
  forward_refused("logits is not aligned", from_logits_, [](RouterInputs& in) {
    in.logits.data = static_cast<const char*>(in.logits.data) + 2;
  });
  forward_refused("selection_bias must have shape [6]", from_logits_, [&](RouterInputs& in) {
    in.selection_bias = tensor_view(static_cast<const float*>(bias_.data()), {5});
  });
  forward_refused("selection_bias of expert 4 is", from_logits_, [&](RouterInputs& in) {
    bias_[4] = -std::numeric_limits<float>::infinity();
    in.selection_bias = tensor_view(static_cast<const float*>(bias_.data()), {kExperts});
  });
}

TEST_F(RouterCall, ReadsTensorsWhoseRowsAreOne) {
  from_x_.x.strides[0] = 0;  // as torch's expand() makes them
  EXPECT_NO_THROW(forward(from_x_));
  for (std::int64_t token = 1; token < kTokens; ++token) {
    EXPECT_EQ(ids_[2 * token], ids_[0]);
    EXPECT_EQ(weights_[2 * token], weights_[0]);
  }
}

TEST_F(RouterCall, ForcedIds) {
  from_logits_.forced_ids =
      tensor_view(static_cast<const std::int32_t*>(forced_.data()), {kTokens, 2});
  EXPECT_NO_THROW(forward(from_logits_));
  const auto nothing = [](RouterInputs&) {};
  forced_[3] = kExperts;
  forward_refused("forced_ids of token 1, slot 1 is 6", from_logits_, nothing,
                  ErrorCode::expert_id_out_of_range);
  forced_[3] = -2;
  forward_refused("forced_ids of token 1, slot 1 is -2", from_logits_, nothing,
                  ErrorCode::expert_id_out_of_range);
  forward_refused("forced_ids must be int32", from_logits_,
                  [](RouterInputs& in) { in.forced_ids.dtype = DType::int64; });
  forward_refused("forced_ids must have shape [3, any]", from_logits_,
                  [](RouterInputs& in) { in.forced_ids.sizes[0] = 2; });
  forward_refused("forced_ids must have at least one slot", from_logits_,
                  [](RouterInputs& in) { in.forced_ids.sizes[1] = 0; });
}

TEST_F(RouterCall, ForwardOutputs) {
  const auto refused = [&](const std::string& named,
                           const std::function<void(RouterOutputs&)>& edit) {
    const RouterOutputs saved = outputs_;
    edit(outputs_);
    expect_refused([&] { forward(from_logits_); }, named);
    outputs_ = saved;
  };
  refused("expert_ids is absent, must be int32 [3, 2]",
          [](RouterOutputs& o) { o.expert_ids = {}; });
  refused("expert_ids must be int32", [](RouterOutputs& o) { o.expert_ids.dtype = DType::int64; });
  refused("weights must be fp32", [](RouterOutputs& o) { o.weights.dtype = DType::bf16; });
  refused("weights must have shape [3, 2]", [](RouterOutputs& o) { o.weights.sizes[1] = 3; });
  refused("weights is written, but its elements overlap",
          [](RouterOutputs& o) { o.weights.strides[0] = 1; });
}

TEST_F(RouterCall, LogitsThatAreNotFinite) {
  const auto nothing = [](RouterInputs&) {};
  logits_[2 * kExperts + 5] = std::nanf("");
  forward_refused("logits of token 2, expert 5 is nan", from_logits_, nothing);
  logits_[2 * kExperts + 5] = -std::numeric_limits<float>::infinity();
  forward_refused("logits of token 2, expert 5 is -inf", from_logits_, nothing);
  x_[1 * kHidden + 2] = to_bf16(std::nanf(""));
  forward_refused("logits of token 1, expert 0 is", from_x_, nothing);
  x_.assign(x_.size(), to_bf16(0.0F));
  router_weight_[3 * kHidden] = std::nanf("");
  forward_refused("logits of token 0, expert 3 is", from_x_, nothing);
}

TEST_F(RouterCall, Backward) {
  using In = RouterBackwardInputs;
  using Out = RouterBackwardOutputs;
  backward_refused("context holds no forward", [](In&, Out&) {});
  forward(from_x_);
  EXPECT_NO_THROW(router_.backward(context_, backward_inputs_, backward_outputs_));
  backward_refused("d_weights must be fp32",
                   [](In& in, Out&) { in.d_weights.dtype = DType::fp64; });
  backward_refused("d_weights is absent, must be fp32 [3, 2]",
                   [](In& in, Out&) { in.d_weights = {}; });
  backward_refused("x is absent", [](In& in, Out&) { in.x = {}; });
  backward_refused("router_weight is absent", [](In& in, Out&) { in.router_weight = {}; });
  backward_refused("x must have shape [3, any]", [](In& in, Out&) { in.x.sizes[0] = 2; });
  backward_refused("d_logits must", [](In&, Out& out) { out.d_logits.sizes[0] = 2; });
  backward_refused("d_x must be fp32", [](In&, Out& out) { out.d_x.dtype = DType::bf16; });
  backward_refused("d_router_weight must have shape [6, 4]",
                   [](In&, Out& out) { out.d_router_weight.sizes[1] = 5; });

  RouterConfig other = small_config();
  other.scale = 2.0F;
  Router other_router(other);
  expect_refused([&] { other_router.backward(context_, backward_inputs_, backward_outputs_); },
                 "context was filled by a router with another configuration");
}

TEST_F(RouterCall, AuxiliaryLossNeedsTheGlobalLoad) {
  RouterConfig config = small_config();
  config.aux_loss_alpha = 0.1F;
  router_ = Router(config);
  forward(from_x_);
  RouterLoad load(kExperts);
  backward_refused("global_load is absent", [](auto&, auto&) {});
  backward_refused("global_load covers 0 tokens", [&](auto& in, auto&) { in.global_load = &load; });
  router_.add_load(context_, load);
  backward_inputs_.global_load = &load;
  EXPECT_NO_THROW(router_.backward(context_, backward_inputs_, backward_outputs_));
  backward_refused("d_aux_loss", [](auto& in, auto&) { in.d_aux_loss = std::nanf(""); });
  RouterLoad wrong(kExperts + 1);
  backward_refused("global_load must have 6 experts",
                   [&](auto& in, auto&) { in.global_load = &wrong; });
  expect_refused([&] { router_.add_load(context_, wrong); }, "load must have 6 experts");
  expect_refused([&] { static_cast<void>(router_.aux_loss(wrong)); }, "global_load must have 6");
  expect_refused([&] { wrong += load; }, "other must have 7 experts");
  load.values()[2] = std::nan("");
  backward_refused("global_load holds nan", [](auto&, auto&) {});
}

TEST(RouterArguments, Balancing) {
  expect_refused([] { RouterLoad{0}; }, "num_experts");
  std::vector<float> bias(4, 0.0F);
  const TensorView view = tensor_view(bias.data(), {4});
  expect_refused([&] { update_selection_bias(RouterLoad(4), -1.0F, view); }, "rate");
  expect_refused([&] { update_selection_bias(RouterLoad(4), std::nanf(""), view); }, "rate");
  expect_refused([&] { update_selection_bias(RouterLoad(5), 1.0F, view); }, "selection_bias");
  expect_refused([&] { update_selection_bias(RouterLoad(), 1.0F, view); }, "global_load");
}

}  // namespace
}  // namespace megamoe
