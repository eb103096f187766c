// What CudaRouter refuses at the call, and what the device reports.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "gpu/gpu_test.h"
#include "gpu/router_device.h"

namespace megamoe::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kTokens = 20;
constexpr std::int64_t kExperts = 60;
constexpr std::int64_t kSlots = 4;

void expect_error(const std::function<void()>& action, const std::string& text,
                  ErrorCode code = ErrorCode::invalid_argument) {
  try {
    action();
    ADD_FAILURE() << "no error: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
        << "'" << error.what() << "' does not have '" << text << "'";
  }
}

RouterConfig failing_config() {
  RouterConfig config =
      router_config(kExperts, kSlots, ScoreFunction::softmax, WeightNorm::sum_to_one);
  config.aux_loss_alpha = 0.1F;
  return config;
}

class CudaRouterFailure : public GpuTest {
 protected:
  CudaRouterFailure()
      : batch_(make_batch(failing_config(), DType::fp32, kTokens, Logits::normal, 31)) {}

  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    router_ = std::make_unique<CudaRouter>(failing_config(), 0);
    expected_ = run_on_device(batch_);
  }
  /// Waits, so that the next call must see what was reported.
  static void wait() { cuda::check(cudaDeviceSynchronize(), "wait"); }

  /// All rows but `bad_tokens` are as without the failure; those are empty.
  void expect_others_right(const DeviceRouting& routing, const std::vector<std::int64_t>& bad) {
    const std::vector<std::int32_t> ids = routing.ids.download();
    const std::vector<float> weights = routing.weights.download();
    for (std::int64_t i = 0; i < kTokens * kSlots; ++i) {
      const bool is_bad = std::count(bad.begin(), bad.end(), i / kSlots) > 0;
      EXPECT_EQ(ids[i], is_bad ? -1 : expected_.ids_TK[i]) << i;
      EXPECT_EQ(weights[i], is_bad ? 0.0F : expected_.weights_TK[i]) << i;
    }
  }

  /// The router works as if nothing had happened.
  void expect_usable() {
    const DeviceRouting routing(batch_);
    routing.run(*router_);
    router_->check();
    EXPECT_EQ(routing.ids.download(), expected_.ids_TK);
    EXPECT_TRUE(same_bits(routing.d_logits.download(), expected_.d_logits_TE));
  }

  RouterBatch batch_;
  RouterResults expected_;
  std::unique_ptr<CudaRouter> router_;
};

TEST_F(CudaRouterFailure, LogitsThatAreNotFinite) {
  batch_.logits_TE[13 * kExperts] = kNan;
  batch_.logits_TE[9 * kExperts + kExperts - 1] = kInfinity;
  const DeviceRouting routing(batch_);
  const std::string text = "logits of token 9, expert 59 is inf";
  router_->forward(routing.inputs(), routing.outputs());
  wait();
  // Sticky: until check() every call throws it.
  for (int i = 0; i < 2; ++i) {
    expect_error([&] { router_->forward(routing.inputs(), routing.outputs()); }, text);
  }
  expect_error([&] { router_->backward(routing.backward_inputs(), routing.d_logits.view()); },
               text);
  EXPECT_TRUE(routing.d_logits.is_untouched());
  expect_error([&] { router_->check(); }, text);
  EXPECT_NO_THROW(router_->check());
  expect_others_right(routing, {9, 13});

  router_->add_load(routing.logits(), routing.ids.view(), routing.load.vector_view());
  expect_error([&] { router_->check(); }, text);
  const std::vector<double> load = routing.load.download();
  double slots = 0;
  for (std::int64_t j = 0; j < kExperts; ++j) slots += load[j];
  EXPECT_EQ(slots, (kTokens - 2) * kSlots);

  router_->backward(routing.backward_inputs(), routing.d_logits.view());
  expect_error([&] { router_->check(); }, text);
  const std::vector<float> gradients = routing.d_logits.download();
  for (const std::int64_t token : {9, 13}) {
    for (std::int64_t j = 0; j < kExperts; ++j) EXPECT_EQ(gradients[token * kExperts + j], 0.0F);
  }
  for (const float gradient : gradients) EXPECT_TRUE(std::isfinite(gradient));
  batch_.logits_TE[13 * kExperts] = 0.0F;
  batch_.logits_TE[9 * kExperts + kExperts - 1] = 0.0F;
  expected_ = run_on_device(batch_);
  expect_usable();
}

TEST_F(CudaRouterFailure, LogitsOfBf16ThatAreNotFinite) {
  batch_.dtype = DType::bf16;
  batch_.logits_TE[19 * kExperts + 33] = -kInfinity;
  const DeviceRouting routing(batch_);
  router_->forward(routing.inputs(), routing.outputs());
  expect_error([&] { router_->check(); }, "logits of token 19, expert 33 is -inf");
}

TEST_F(CudaRouterFailure, IdsOutOfRange) {
  for (const std::int32_t bad : {static_cast<std::int32_t>(kExperts), -2}) {
    RouterBatch batch = batch_;
    batch.ids_are_forced = true;
    batch.forced_TK = expected_.ids_TK;
    batch.forced_TK[3 * kSlots + 2] = bad;
    DeviceRouting routing(batch);
    const std::string text = "expert ids of token 3, slot 2 is " + std::to_string(bad);
    router_->forward(routing.inputs(), routing.outputs());
    expect_error([&] { router_->check(); }, text, ErrorCode::expert_id_out_of_range);
    expect_others_right(routing, {3});

    CudaRouterBackwardInputs inputs = routing.backward_inputs();
    inputs.expert_ids = routing.forced.view();
    routing.load.upload(expected_.load);
    router_->backward(inputs, routing.d_logits.view());
    expect_error([&] { router_->check(); }, text, ErrorCode::expert_id_out_of_range);
    const std::vector<float> gradients = routing.d_logits.download();
    for (std::int64_t i = 0; i < kTokens * kExperts; ++i) {
      EXPECT_EQ(gradients[i], i / kExperts == 3 ? 0.0F : expected_.d_logits_TE[i]) << i;
    }

    // In place the bad id is gone, but not the report.
    RouterInputs in_place = routing.inputs();
    in_place.forced_ids = routing.forced.view();
    router_->forward(in_place, {routing.forced.view(), routing.weights.view()});
    expect_error([&] { router_->check(); }, "token 3");
  }
  expect_usable();
}

TEST_F(CudaRouterFailure, BiasesThatAreNotFinite) {
  RouterBatch batch = batch_;
  batch.bias_E[41] = kNan;
  const DeviceRouting routing(batch);
  router_->forward(routing.inputs(), routing.outputs());
  expect_error([&] { router_->check(); }, "selection_bias of expert 41 is nan");
  EXPECT_EQ(routing.ids.download(), std::vector<std::int32_t>(kTokens * kSlots, -1));
  EXPECT_EQ(routing.weights.download(), std::vector<float>(kTokens * kSlots, 0.0F));
  expect_usable();
}

TEST_F(CudaRouterFailure, LoadsThatAreNoSums) {
  DeviceRouting routing(batch_);
  router_->forward(routing.inputs(), routing.outputs());
  router_->check();
  const auto expect_refused = [&](std::int64_t index, double value, const std::string& text) {
    std::vector<double> load = expected_.load;
    load[index] = value;
    routing.load.upload(load);
    router_->backward(routing.backward_inputs(), routing.d_logits.view());
    expect_error([&] { router_->check(); }, text);
    EXPECT_TRUE(routing.d_logits.is_untouched()) << text;
  };
  expect_refused(5, std::nan(""), "global_load[5] is nan");
  expect_refused(kExperts + 7, -1.0, "global_load[67] is -1");
  expect_refused(2 * kExperts, 1e300, "global_load[120] is 1");
  expect_refused(2 * kExperts, 19.0, "global_load covers 19.000000 tokens, fewer than the 20");

  std::vector<double> load = expected_.load;
  load[0] = std::nan("");
  routing.load.upload(load);
  router_->aux_loss(routing.load.vector_view(), routing.aux_loss.vector_view());
  expect_error([&] { router_->check(); }, "global_load[0] is nan");
  EXPECT_TRUE(routing.aux_loss.is_untouched());
  router_->update_selection_bias(routing.load.vector_view(), 0.1F, routing.bias.vector_view());
  expect_error([&] { router_->check(); }, "global_load[0] is nan");
  EXPECT_TRUE(same_bits(routing.bias.download(), batch_.bias_E));
  expect_usable();
}

TEST_F(CudaRouterFailure, ADerivativeOfTheAuxiliaryLossThatIsNotFinite) {
  DeviceRouting routing(batch_);
  router_->forward(routing.inputs(), routing.outputs());
  routing.load.upload(expected_.load);
  routing.d_aux_loss.upload({kNan});
  router_->backward(routing.backward_inputs(), routing.d_logits.view());
  expect_error([&] { router_->check(); }, "d_aux_loss must be finite");
  EXPECT_TRUE(routing.d_logits.is_untouched());
  expect_usable();
}

TEST_F(CudaRouterFailure, TheFirstFaultIsKept) {
  RouterBatch first = batch_;
  first.logits_TE[17 * kExperts + 1] = kNan;
  RouterBatch second = batch_;
  second.logits_TE[2 * kExperts + 1] = kNan;
  const DeviceRouting first_routing(first);
  const DeviceRouting second_routing(second);
  cudaStream_t stream = nullptr;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  // Both enqueued before the device has found anything, as in a graph.
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  router_->forward(first_routing.inputs(), first_routing.outputs(), {stream});
  router_->forward(second_routing.inputs(), second_routing.outputs(), {stream});
  cuda::check(cudaStreamEndCapture(stream, &graph), "capture");
  cuda::check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  cuda::check(cudaGraphLaunch(executable, stream), "replay");
  expect_error([&] { router_->check({stream}); }, "logits of token 17, expert 1 is nan");
  EXPECT_NO_THROW(router_->check({stream}));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

/// A call without tokens writes nothing and reads no pointer.
TEST_F(CudaRouterFailure, CallsWithoutTokens) {
  const auto empty = [](std::int64_t columns) {
    return tensor_view(static_cast<float*>(nullptr), {0, columns});
  };
  const TensorView no_ids = tensor_view(static_cast<std::int32_t*>(nullptr), {0, kSlots});
  const DeviceRouting routing(batch_);
  RouterInputs inputs;
  inputs.logits = empty(kExperts);
  router_->forward(inputs, {no_ids, empty(kSlots)});
  router_->add_load(empty(kExperts), no_ids, routing.load.vector_view());
  router_->backward({empty(kExperts), no_ids, empty(kSlots), routing.load.vector_view(), {}},
                    empty(kExperts));
  // No tokens, no loss.
  router_->aux_loss(routing.load.vector_view(), routing.aux_loss.vector_view());
  router_->check();
  EXPECT_EQ(routing.load.download(), std::vector<double>(2 * kExperts + 1, 0.0));
  EXPECT_EQ(routing.aux_loss.download()[0], 0.0F);
}

/// Each tensor in turn lies in the host's memory.
TEST_F(CudaRouterFailure, HostMemory) {
  const DeviceRouting routing(batch_);
  std::vector<double> host(kTokens * (kExperts + 3));
  const auto on_host = [&](ConstTensorView tensor) {
    tensor.data = host.data();
    return tensor;
  };
  const auto written_on_host = [&](TensorView tensor) {
    tensor.data = host.data();
    return tensor;
  };
  const auto forward = [&](const std::string& name,
                           const std::function<void(RouterInputs&, RouterOutputs&)>& edit) {
    RouterInputs inputs = routing.inputs();
    RouterOutputs outputs = routing.outputs();
    edit(inputs, outputs);
    expect_error([&] { router_->forward(inputs, outputs); },
                 name + " lies in host memory; the router is on device 0");
  };
  forward("logits", [&](auto& in, auto&) { in.logits = on_host(in.logits); });
  forward("selection_bias",
          [&](auto& in, auto&) { in.selection_bias = on_host(in.selection_bias); });
  forward("forced_ids", [&](auto& in, auto&) { in.forced_ids = on_host(routing.forced.view()); });
  forward("expert_ids",
          [&](auto&, auto& out) { out.expert_ids = written_on_host(out.expert_ids); });
  forward("weights", [&](auto&, auto& out) { out.weights = written_on_host(out.weights); });

  const auto backward = [&](const std::string& name,
                            const std::function<void(CudaRouterBackwardInputs&)>& edit) {
    CudaRouterBackwardInputs inputs = routing.backward_inputs();
    edit(inputs);
    expect_error([&] { router_->backward(inputs, routing.d_logits.view()); },
                 name + " lies in host memory");
  };
  backward("logits", [&](auto& in) { in.logits = on_host(in.logits); });
  backward("expert_ids", [&](auto& in) { in.expert_ids = on_host(in.expert_ids); });
  backward("d_weights", [&](auto& in) { in.d_weights = on_host(in.d_weights); });
  backward("global_load", [&](auto& in) { in.global_load = on_host(in.global_load); });
  backward("d_aux_loss", [&](auto& in) { in.d_aux_loss = on_host(in.d_aux_loss); });
  const TensorView host_logits = written_on_host(routing.d_logits.view());
  expect_error([&] { router_->backward(routing.backward_inputs(), host_logits); },
               "d_logits lies in host memory");

  const TensorView host_load = written_on_host(routing.load.vector_view());
  expect_error([&] { router_->add_load(routing.logits(), routing.ids.view(), host_load); },
               "load lies in host memory");
  expect_error([&] { router_->aux_loss(host_load, routing.aux_loss.vector_view()); },
               "global_load lies in host memory");
  const TensorView host_bias = written_on_host(routing.bias.vector_view());
  expect_error([&] { router_->update_selection_bias(routing.load.vector_view(), 0.1F, host_bias); },
               "selection_bias lies in host memory");
  EXPECT_TRUE(routing.ids.is_untouched());
  EXPECT_TRUE(routing.weights.is_untouched());
  EXPECT_TRUE(routing.d_logits.is_untouched());
  expect_usable();
}

TEST_F(CudaRouterFailure, TensorsAreCheckedAtTheCall) {
  const DeviceRouting routing(batch_);
  RouterInputs inputs = routing.inputs();
  inputs.logits.dtype = DType::fp64;
  expect_error([&] { router_->forward(inputs, routing.outputs()); }, "logits must be fp32 or bf16");
  RouterOutputs outputs = routing.outputs();
  outputs.expert_ids.dtype = DType::int64;
  expect_error([&] { router_->forward(routing.inputs(), outputs); }, "expert_ids must be int32");
  expect_error(
      [&] {
        router_->backward({routing.logits(), routing.ids.view(), routing.d_weights.view(), {}, {}},
                          routing.d_logits.view());
      },
      "global_load is absent");
  expect_usable();
}

TEST_F(CudaRouterFailure, DevicesThatAreNotThere) {
  expect_error([] { CudaRouter(failing_config(), 1000); }, "device is 1000");
  expect_error([] { CudaRouter(failing_config(), -1); }, "device is -1");
}

}  // namespace
}  // namespace megamoe::testing
