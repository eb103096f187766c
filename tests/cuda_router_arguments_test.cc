// What CudaRouter refuses before it touches a device: configurations and tensors, by name.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "megamoe/cuda.h"
#include "megamoe/cuda_router.h"
#include "megamoe/error.h"
#include "routing/cuda_router_check.h"

namespace megamoe {
namespace {

void expect_refused(const std::function<void()>& action, const std::string& named,
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

constexpr std::int64_t kTokens = 3;
constexpr std::int64_t kExperts = 6;
constexpr std::int64_t kSlots = 2;

RouterConfig small_config() {
  RouterConfig config;
  config.num_experts = kExperts;
  config.top_k = kSlots;
  config.aux_loss_alpha = 0.1F;
  return config;
}

TEST(CudaRouterArguments, ConfigurationsOfAnyBuild) {
  const auto refused = [](const std::string& named, ErrorCode code,
                          const std::function<void(RouterConfig&)>& edit) {
    RouterConfig config = small_config();
    edit(config);
    expect_refused([&] { CudaRouter{config, 0}; }, named, code);
  };
  refused("num_experts", ErrorCode::invalid_argument, [](auto& c) { c.num_experts = 0; });
  refused("top_k", ErrorCode::invalid_argument, [](auto& c) { c.top_k = 7; });
  refused("num_experts must be at most 512, got 513", ErrorCode::unsupported,
          [](auto& c) { c.num_experts = 513; });
  refused("top_k must be at most 16, got 17", ErrorCode::unsupported, [](auto& c) {
    c.num_experts = 64;
    c.top_k = 17;
  });
  refused("num_groups must be at most 32, got 64", ErrorCode::unsupported, [](auto& c) {
    c.num_experts = 64;
    c.num_groups = 64;
    c.top_groups = 8;
  });
}

TEST(CudaRouterArguments, NeedsADevice) {
  if (num_cuda_devices() > 0) GTEST_SKIP() << "there is one";
  try {
    CudaRouter router(small_config(), 0);
    ADD_FAILURE() << "a router without a device";
  } catch (const Error& error) {
    const std::string text = error.what();
    const bool not_built = error.code() == ErrorCode::unsupported &&
                           text.find("this build has none") != std::string::npos;
    const bool no_device = error.code() == ErrorCode::invalid_argument &&
                           text.find("device is 0") != std::string::npos;
    EXPECT_TRUE(not_built || no_device) << text;
  }
}

/// Valid arguments of every call, to be spoilt in one place at a time. Nothing is read or written.
class CudaRouterCall : public ::testing::Test {
 protected:
  CudaRouterCall() {
    const auto matrix = [&](DType dtype, std::int64_t columns) {
      TensorView view = tensor_view(memory_.data(), {kTokens, columns});
      view.dtype = dtype;
      return view;
    };
    const auto vector = [&](DType dtype, std::int64_t size) {
      TensorView view = tensor_view(memory_.data(), {size});
      view.dtype = dtype;
      return view;
    };
    inputs_.logits = matrix(DType::bf16, kExperts);
    inputs_.selection_bias = vector(DType::fp32, kExperts);
    inputs_.forced_ids = matrix(DType::int32, kSlots);
    outputs_ = {matrix(DType::int32, kSlots), matrix(DType::fp32, kSlots)};
    load_ = vector(DType::fp64, 2 * kExperts + 1);
    backward_ = {matrix(DType::fp32, kExperts), matrix(DType::int32, kSlots),
                 matrix(DType::fp32, kSlots), load_, vector(DType::fp32, 1)};
    d_logits_ = matrix(DType::fp32, kExperts);
    bias_ = vector(DType::fp32, kExperts);
    loss_ = vector(DType::fp32, 1);
  }

  void forward_refused(const std::string& named,
                       const std::function<void(RouterInputs&, RouterOutputs&)>& edit,
                       ErrorCode code = ErrorCode::invalid_argument) {
    RouterInputs inputs = inputs_;
    RouterOutputs outputs = outputs_;
    edit(inputs, outputs);
    expect_refused([&] { detail::check_cuda_forward(small_config(), inputs, outputs); }, named,
                   code);
  }
  void backward_refused(const std::string& named,
                        const std::function<void(CudaRouterBackwardInputs&, TensorView&)>& edit,
                        ErrorCode code = ErrorCode::invalid_argument) {
    CudaRouterBackwardInputs inputs = backward_;
    TensorView d_logits = d_logits_;
    edit(inputs, d_logits);
    expect_refused([&] { detail::check_cuda_backward(small_config(), inputs, d_logits); }, named,
                   code);
  }

  std::vector<double> memory_ = std::vector<double>(64);
  RouterInputs inputs_;
  RouterOutputs outputs_;
  CudaRouterBackwardInputs backward_;
  TensorView load_;
  TensorView d_logits_;
  TensorView bias_;
  TensorView loss_;
};

TEST_F(CudaRouterCall, Forward) {
  const detail::RouterCallShape shape =
      detail::check_cuda_forward(small_config(), inputs_, outputs_);
  EXPECT_EQ(shape.num_tokens, kTokens);
  EXPECT_EQ(shape.num_slots, kSlots);
  forward_refused(
      "x must be absent; the product that makes logits is the caller's",
      [](auto& in, auto&) { in.x = in.logits; }, ErrorCode::unsupported);
  forward_refused(
      "router_weight must be absent", [](auto& in, auto&) { in.router_weight = in.logits; },
      ErrorCode::unsupported);
  forward_refused("logits is absent", [](auto& in, auto&) { in.logits = {}; });
  forward_refused("logits must be fp32 or bf16, is fp64",
                  [](auto& in, auto&) { in.logits.dtype = DType::fp64; });
  forward_refused(
      "logits is fp16, which is not supported yet",
      [](auto& in, auto&) { in.logits.dtype = DType::fp16; }, ErrorCode::unsupported);
  forward_refused("logits must have shape [any, 6]",
                  [](auto& in, auto&) { in.logits.sizes[1] = 5; });
  forward_refused("logits must have contiguous columns", [](auto& in, auto&) {
    in.logits.strides = {1, kTokens};
  });
  forward_refused("logits is not aligned", [](auto& in, auto&) {
    in.logits.data = static_cast<const char*>(in.logits.data) + 1;
  });
  forward_refused("logits has no data", [](auto& in, auto&) { in.logits.data = nullptr; });
  forward_refused(
      "the number of tokens must be at most",
      [](auto& in, auto&) { in.logits.sizes[0] = (std::int64_t{1} << 32) + 1; },
      ErrorCode::unsupported);
  forward_refused("selection_bias must be fp32, is bf16",
                  [](auto& in, auto&) { in.selection_bias.dtype = DType::bf16; });
  forward_refused("selection_bias must have shape [6]",
                  [](auto& in, auto&) { in.selection_bias.sizes[0] = 7; });
  forward_refused("forced_ids must be int32, is int64",
                  [](auto& in, auto&) { in.forced_ids.dtype = DType::int64; });
  forward_refused("forced_ids must have shape [3, any]",
                  [](auto& in, auto&) { in.forced_ids.sizes[0] = 4; });
  forward_refused("forced_ids must have at least one slot",
                  [](auto& in, auto&) { in.forced_ids.sizes[1] = 0; });
  forward_refused(
      "the slots of forced_ids must be at most 16, got 17",
      [](auto& in, auto&) {
        in.forced_ids.sizes[1] = 17;
        in.forced_ids.strides[0] = 17;
      },
      ErrorCode::unsupported);
  forward_refused("expert_ids must be int32, is int64",
                  [](auto&, auto& out) { out.expert_ids.dtype = DType::int64; });
  forward_refused("weights must be fp32, is fp64",
                  [](auto&, auto& out) { out.weights.dtype = DType::fp64; });
  forward_refused("weights must have shape [3, 2]",
                  [](auto&, auto& out) { out.weights.sizes[1] = 3; });
  forward_refused("weights is written, but its elements overlap",
                  [](auto&, auto& out) { out.weights.strides[0] = 1; });
}

TEST_F(CudaRouterCall, ForcedIdsBringTheirOwnSlots) {
  inputs_.forced_ids.sizes[1] = 7;  // more than there are experts
  inputs_.forced_ids.strides[0] = 7;
  expect_refused([&] { detail::check_cuda_forward(small_config(), inputs_, outputs_); },
                 "expert_ids must have shape [3, 7]");
  for (TensorView* view : {&outputs_.expert_ids, &outputs_.weights}) {
    view->sizes[1] = 7;
    view->strides[0] = 7;
  }
  EXPECT_EQ(detail::check_cuda_forward(small_config(), inputs_, outputs_).num_slots, 7);
}

TEST_F(CudaRouterCall, Backward) {
  EXPECT_EQ(detail::check_cuda_backward(small_config(), backward_, d_logits_).num_tokens, kTokens);
  backward_refused("logits is absent", [](auto& in, auto&) { in.logits = {}; });
  backward_refused("expert_ids is absent", [](auto& in, auto&) { in.expert_ids = {}; });
  backward_refused("expert_ids must be int32",
                   [](auto& in, auto&) { in.expert_ids.dtype = DType::int64; });
  backward_refused("expert_ids must have shape [3, any]",
                   [](auto& in, auto&) { in.expert_ids.sizes[0] = 2; });
  backward_refused("d_weights must have shape [3, 2]",
                   [](auto& in, auto&) { in.d_weights.sizes[1] = 1; });
  backward_refused("d_weights must be fp32",
                   [](auto& in, auto&) { in.d_weights.dtype = DType::bf16; });
  backward_refused("d_logits must be fp32, is bf16",
                   [](auto&, auto& out) { out.dtype = DType::bf16; });
  backward_refused("d_logits must have shape [3, 6]", [](auto&, auto& out) { out.sizes[1] = 5; });
  backward_refused("d_logits is written, but", [](auto&, auto& out) { out.strides[0] = 5; });
  backward_refused("global_load is absent: aux_loss_alpha is not 0",
                   [](auto& in, auto&) { in.global_load = {}; });
  backward_refused("global_load must be fp64, is fp32",
                   [](auto& in, auto&) { in.global_load.dtype = DType::fp32; });
  backward_refused("global_load must have shape [13]",
                   [](auto& in, auto&) { in.global_load.sizes[0] = 12; });
  backward_refused("d_aux_loss must be fp32",
                   [](auto& in, auto&) { in.d_aux_loss.dtype = DType::fp64; });

  backward_.d_aux_loss = {};
  EXPECT_NO_THROW(detail::check_cuda_backward(small_config(), backward_, d_logits_));
  RouterConfig without_loss = small_config();
  without_loss.aux_loss_alpha = 0.0F;
  backward_.global_load = {};
  EXPECT_NO_THROW(detail::check_cuda_backward(without_loss, backward_, d_logits_));
}

TEST_F(CudaRouterCall, LoadsAndBiases) {
  const RouterConfig config = small_config();
  TensorView wrong_load = load_;
  wrong_load.sizes[0] = kExperts;
  TensorView wrong_bias = bias_;
  wrong_bias.dtype = DType::bf16;
  TensorView wrong_loss = loss_;
  wrong_loss.dtype = DType::fp64;
  const ConstTensorView& logits = backward_.logits;
  const ConstTensorView& ids = backward_.expert_ids;
  EXPECT_NO_THROW(detail::check_cuda_add_load(config, logits, ids, load_));
  EXPECT_NO_THROW(detail::check_cuda_aux_loss(config, load_, loss_));
  EXPECT_NO_THROW(detail::check_cuda_bias_update(config, load_, 0.0F, bias_));
  expect_refused([&] { detail::check_cuda_add_load(config, logits, ids, wrong_load); },
                 "load must have shape [13]");
  expect_refused([&] { detail::check_cuda_add_load(config, logits, {}, load_); },
                 "expert_ids is absent");
  expect_refused([&] { detail::check_cuda_aux_loss(config, wrong_load, loss_); },
                 "global_load must have shape [13]");
  expect_refused([&] { detail::check_cuda_aux_loss(config, load_, wrong_loss); },
                 "loss must be fp32");
  expect_refused([&] { detail::check_cuda_bias_update(config, wrong_load, 0.1F, bias_); },
                 "global_load must have shape [13]");
  expect_refused([&] { detail::check_cuda_bias_update(config, load_, 0.1F, wrong_bias); },
                 "selection_bias must be fp32");
  for (const float rate : {-1.0F, std::nanf("")}) {
    expect_refused([&] { detail::check_cuda_bias_update(config, load_, rate, bias_); }, "rate");
  }
}

}  // namespace
}  // namespace megamoe
