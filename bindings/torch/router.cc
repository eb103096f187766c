// The router's operators: Router on the CPU, CudaRouter on a device.
//
// Legend: T tokens, E experts of all ranks, K slots. A load is [2E + 1] fp64, as
// RouterLoad::values().
#include "router.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "layer/agreement.h"
#include "megamoe/cuda_router.h"
#include "megamoe/router.h"
#include "tensors.h"

namespace megamoe::torch_ops {
namespace {

using torch::headeronly::ScalarType;

RouterConfig config_of(const Tensor& logits, std::int64_t top_k, const std::string& score_function,
                       bool renormalise, double scale, std::int64_t num_groups,
                       std::int64_t top_groups, double aux_loss_alpha) {
  if (logits.dim() != 2) {
    throw Error(ErrorCode::invalid_argument,
                "logits has shape " + text_of(sizes_of(logits)) + ", must be [T, E]");
  }
  if (score_function != "softmax" && score_function != "sigmoid") {
    throw Error(ErrorCode::invalid_argument,
                "score_function is \"" + score_function + "\", must be softmax or sigmoid");
  }
  RouterConfig config;
  config.num_experts = logits.sizes()[1];
  config.top_k = top_k;
  config.score_function =
      score_function == "softmax" ? ScoreFunction::softmax : ScoreFunction::sigmoid;
  config.weight_norm = renormalise ? WeightNorm::sum_to_one : WeightNorm::none;
  config.scale = static_cast<float>(scale);
  config.num_groups = num_groups;
  config.top_groups = top_groups;
  config.aux_loss_alpha = static_cast<float>(aux_loss_alpha);
  return config;
}

/// A router on a device, for one caller at a time.
struct DeviceRouter {
  DeviceRouter(const RouterConfig& config, int device) : router(config, device) {}
  std::mutex mutex;
  CudaRouter router;
};

/// The device, then what the caller chose.
using RouterKey = std::array<std::int64_t, 9>;

/// Never destroyed: graphs hold pointers into routers, and CUDA may end before static objects do.
struct DeviceRouters {
  std::mutex mutex;
  std::map<RouterKey, std::shared_ptr<DeviceRouter>> entries;
  static DeviceRouters& instance() {
    static auto* routers = new DeviceRouters;
    return *routers;
  }
};

RouterKey key_of(const RouterConfig& config, int device) {
  return {device,
          config.num_experts,
          config.top_k,
          static_cast<std::int64_t>(config.score_function),
          static_cast<std::int64_t>(config.weight_norm),
          std::bit_cast<std::int32_t>(config.scale),
          config.num_groups,
          config.top_groups,
          std::bit_cast<std::int32_t>(config.aux_loss_alpha)};
}

std::shared_ptr<DeviceRouter> device_router(const RouterConfig& config, int device) {
  DeviceRouters& routers = DeviceRouters::instance();
  const std::lock_guard lock(routers.mutex);
  const RouterKey key = key_of(config, device);
  const auto found = routers.entries.find(key);
  if (found != routers.entries.end()) return found->second;
  auto router = std::make_shared<DeviceRouter>(config, device);  // may refuse the configuration
  routers.entries.emplace(key, router);
  return router;
}

/// What a forward call returns.
struct Routing {
  Tensor expert_ids;
  Tensor weights;
  Tensor load;
  Tensor aux_loss;
};

Routing empty_routing(const Tensor& logits, const RouterConfig& config) {
  const std::int64_t num_tokens = logits.sizes()[0];
  return {empty(logits, {num_tokens, config.top_k}, ScalarType::Int),
          empty(logits, {num_tokens, config.top_k}, ScalarType::Float),
          torch::stable::new_zeros(logits, {2 * config.num_experts + 1}, ScalarType::Double),
          torch::stable::new_zeros(logits, {1}, ScalarType::Float)};
}

void route_on_host(const RouterConfig& config, const RouterInputs& inputs, Routing& routing) {
  Router router(config);
  RouterContext context;
  router.forward(inputs, {view("expert_ids", routing.expert_ids), view("weights", routing.weights)},
                 context);
  RouterLoad load(config.num_experts);
  router.add_load(context, load);
  std::copy(load.values().begin(), load.values().end(),
            static_cast<double*>(routing.load.mutable_data_ptr()));
  if (config.aux_loss_alpha != 0.0F) {
    *static_cast<float*>(routing.aux_loss.mutable_data_ptr()) =
        static_cast<float>(router.aux_loss(load));
  }
}

void route_on_device(const RouterConfig& config, const RouterInputs& inputs, Routing& routing,
                     const Place& place) {
  const std::shared_ptr<DeviceRouter> shared = device_router(config, place.device);
  const std::lock_guard lock(shared->mutex);
  CudaRouter& router = shared->router;
  const ConstTensorView ids = const_view("expert_ids", routing.expert_ids);
  router.forward(inputs, {view("expert_ids", routing.expert_ids), view("weights", routing.weights)},
                 place.stream);
  router.add_load(inputs.logits, ids, view("load", routing.load), place.stream);
  if (config.aux_loss_alpha != 0.0F) {
    router.aux_loss(const_view("load", routing.load), view("aux_loss", routing.aux_loss),
                    place.stream);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> route(const Tensor& logits,
                                                 std::optional<Tensor> selection_bias,
                                                 std::int64_t top_k, std::string score_function,
                                                 bool renormalise, double scale,
                                                 std::int64_t num_groups, std::int64_t top_groups,
                                                 double aux_loss_alpha) {
  const Place place(logits);
  const RouterConfig config = config_of(logits, top_k, score_function, renormalise, scale,
                                        num_groups, top_groups, aux_loss_alpha);
  Routing routing = empty_routing(logits, config);
  RouterInputs inputs;
  inputs.logits = const_view("logits", logits);
  if (selection_bias.has_value()) {
    inputs.selection_bias = const_view("selection_bias", *selection_bias);
  }
  if (place.on_host()) {
    route_on_host(config, inputs, routing);
  } else {
    route_on_device(config, inputs, routing, place);
  }
  return {routing.weights, routing.expert_ids, routing.load, routing.aux_loss};
}

/// Scores are computed again from the logits; the ids of the forward call are forced.
void route_backward_on_host(const RouterConfig& config, const CudaRouterBackwardInputs& inputs,
                            const TensorView& d_logits) {
  Router router(config);
  RouterContext context;
  const std::int64_t num_tokens = inputs.expert_ids.sizes[0];
  const std::int64_t top_k = inputs.expert_ids.sizes[1];
  std::vector<std::int32_t> ids(num_tokens * top_k);
  std::vector<float> weights(num_tokens * top_k);
  RouterInputs forced;
  forced.logits = inputs.logits;
  forced.forced_ids = inputs.expert_ids;
  router.forward(forced,
                 {tensor_view(ids.data(), {num_tokens, top_k}),
                  tensor_view(weights.data(), {num_tokens, top_k})},
                 context);
  RouterLoad load(config.num_experts);
  const auto* values = static_cast<const double*>(inputs.global_load.data);
  std::copy(values, values + load.values().size(), load.values().begin());
  RouterBackwardInputs gradients;
  gradients.d_weights = inputs.d_weights;
  gradients.global_load = &load;
  gradients.d_aux_loss = *static_cast<const float*>(inputs.d_aux_loss.data);
  RouterBackwardOutputs outputs;
  outputs.d_logits = d_logits;
  router.backward(context, gradients, outputs);
}

Tensor route_backward(const Tensor& logits, const Tensor& expert_ids, const Tensor& d_weights,
                      const Tensor& load, const Tensor& d_aux_loss, std::int64_t top_k,
                      std::string score_function, bool renormalise, double scale,
                      std::int64_t num_groups, std::int64_t top_groups, double aux_loss_alpha) {
  const Place place(logits);
  const RouterConfig config = config_of(logits, top_k, score_function, renormalise, scale,
                                        num_groups, top_groups, aux_loss_alpha);
  Tensor d_logits = empty(logits, sizes_of(logits), ScalarType::Float);
  const CudaRouterBackwardInputs inputs{
      const_view("logits", logits), const_view("expert_ids", expert_ids),
      const_view("d_weights", d_weights), const_view("load", load),
      const_view("d_aux_loss", d_aux_loss)};
  if (place.on_host()) {
    route_backward_on_host(config, inputs, view("d_logits", d_logits));
  } else {
    const std::shared_ptr<DeviceRouter> shared = device_router(config, place.device);
    const std::lock_guard lock(shared->mutex);
    shared->router.backward(inputs, view("d_logits", d_logits), place.stream);
  }
  return d_logits;
}

}  // namespace

LocalOutcome check_routers(const std::function<Stream(int device)>& stream_of) {
  DeviceRouters& routers = DeviceRouters::instance();
  const std::lock_guard lock(routers.mutex);
  LocalOutcome first;
  for (const auto& entry : routers.entries) {
    DeviceRouter& shared = *entry.second;
    const Stream stream = stream_of(static_cast<int>(entry.first.front()));
    const std::lock_guard router_lock(shared.mutex);
    const LocalOutcome outcome = outcome_of([&] { shared.router.check(stream); });
    if (first.failed == 0) first = outcome;
  }
  return first;
}

}  // namespace megamoe::torch_ops

#define MEGAMOE_ROUTER_OPTIONS                                                                     \
  "int top_k, str score_function, bool renormalise, float scale, int num_groups, int top_groups, " \
  "float aux_loss_alpha"

STABLE_TORCH_LIBRARY_FRAGMENT(megamoe, library) {
  library.def("route(Tensor logits, Tensor? selection_bias, " MEGAMOE_ROUTER_OPTIONS
              ") -> (Tensor weights, Tensor expert_ids, Tensor load, Tensor aux_loss)");
  library.def(
      "route_backward(Tensor logits, Tensor expert_ids, Tensor d_weights, Tensor load, "
      "Tensor d_aux_loss, " MEGAMOE_ROUTER_OPTIONS ") -> Tensor d_logits");
}

STABLE_TORCH_LIBRARY_IMPL(megamoe, CPU, library) {
  library.impl("route", TORCH_BOX(&megamoe::torch_ops::route));
  library.impl("route_backward", TORCH_BOX(&megamoe::torch_ops::route_backward));
}

STABLE_TORCH_LIBRARY_IMPL(megamoe, CUDA, library) {
  library.impl("route", TORCH_BOX(&megamoe::torch_ops::route));
  library.impl("route_backward", TORCH_BOX(&megamoe::torch_ops::route_backward));
}
