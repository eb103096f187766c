// The operators of torch.ops.megamoe over the C++ API, through torch's stable ABI.
//
// Legend: T tokens of this rank ([...] leading dimensions flattened), K slots, H hidden, I
// intermediate, e experts of this rank, R ranks.
//
// How a forward call's context reaches its backward call: the forward operator returns, beside y,
// an int64 tensor `call` [e] on the CPU. What it holds is data like any other (the rows that each
// local expert received; on CUDA, where only the device knows them, -1); its memory belongs to the
// CallContext and is released with it. So whatever keeps the tensor keeps the context: autograd's
// saved tensors, the cache of selective checkpointing, a compiled graph; without a backward pass
// nothing keeps it, and it goes at once. The backward operator finds the context by the tensor's
// address. A copy of the tensor (hooks that move saved tensors elsewhere) has another address: then
// the backward operator runs the forward call again, with equal bits. Rejected: a number as handle,
// which nothing frees, and which would make outputs differ from run to run; a ScriptObject, which
// is not in the stable ABI.
//
// A rank must not fail alone: whatever it finds wrong before the call is exchanged first on the
// CPU, and told to the peers by a refused call on CUDA, where ranks do not wait for each other
// (Group).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <climits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "group.h"
#include "megamoe/cuda.h"
#include "router.h"
#include "tensors.h"

namespace megamoe::torch_ops {
namespace {

using torch::headeronly::ScalarType;

/// The options that follow the tensors in both operators.
struct Options {
  std::string group;
  std::string activation;
  double activation_limit;
  bool save_products;
  bool overlap_comm;
  bool main_grad;
  std::int64_t max_tokens;
  std::int64_t row_capacity;
  std::int64_t num_sms;
};

Activation activation_of(const Options& options) {
  for (const auto kind :
       {ActivationKind::swiglu, ActivationKind::clamped_swiglu, ActivationKind::gelu_erf,
        ActivationKind::gelu_tanh, ActivationKind::relu2, ActivationKind::identity}) {
    if (options.activation == to_string(kind)) {
      return {kind, static_cast<float>(options.activation_limit)};
    }
  }
  throw Error(ErrorCode::invalid_argument,
              "activation is \"" + options.activation +
                  "\", must be swiglu, clamped_swiglu, gelu_erf, gelu_tanh, relu2 or identity");
}

void check_sizes(const char* name, const Tensor& tensor, const std::vector<std::int64_t>& expected,
                 const char* meaning) {
  if (sizes_of(tensor) == expected) return;
  throw Error(ErrorCode::invalid_argument, std::string(name) + " must have shape " + meaning +
                                               " = " + text_of(expected) + ", is " +
                                               text_of(sizes_of(tensor)));
}

/// A call's tensors as the library takes them, and the layer that they ask for. Holds the copies.
struct Arguments {
  LayerConfig config;
  Tensor x_TH;
  Tensor ids_TK;
  Tensor weights_TK;
  ForwardInput input;
  std::int64_t num_tokens = 0;
};

Arguments prepare(const Tensor& x, const Tensor& expert_ids, const Tensor& weights,
                  const Tensor& gate_up, const Tensor& down, const Options& options,
                  int num_ranks) {
  Arguments arguments;
  LayerConfig& config = arguments.config;
  config.activation = activation_of(options);
  const bool gated = is_gated(config.activation.kind);
  if (leading_sizes("expert_ids", expert_ids) != leading_sizes("x", x)) {
    throw Error(ErrorCode::invalid_argument,
                "expert_ids has shape " + text_of(sizes_of(expert_ids)) +
                    "; its leading dimensions must be those of x, " + text_of(sizes_of(x)));
  }
  check_sizes("weights", weights, sizes_of(expert_ids), "of expert_ids");
  if (down.dim() != 3 || gate_up.dim() != 3) {
    throw Error(ErrorCode::invalid_argument,
                "gate_up and down must have three dimensions, [e, 2I, H] and [e, H, I], are " +
                    text_of(sizes_of(gate_up)) + " and " + text_of(sizes_of(down)));
  }
  const std::int64_t num_experts = down.sizes()[0];
  const std::int64_t hidden = x.sizes()[x.dim() - 1];
  const std::int64_t intermediate = down.sizes()[2];
  check_sizes("down", down, {num_experts, hidden, intermediate}, "[e, H, I]");
  check_sizes("gate_up", gate_up, {num_experts, (gated ? 2 : 1) * intermediate, hidden},
              gated ? "[e, 2I, H]" : "[e, I, H] (no gate)");
  for (const Tensor* other : {&expert_ids, &weights, &gate_up, &down}) {
    if (other->device() != x.device()) {
      throw Error(ErrorCode::invalid_argument,
                  "x, expert_ids, weights, gate_up and down must be on one device");
    }
  }

  config.shape = {options.max_tokens, hidden, intermediate,
                  static_cast<std::int32_t>(num_experts * num_ranks),
                  static_cast<std::int32_t>(expert_ids.sizes()[expert_ids.dim() - 1])};
  config.row_capacity = options.row_capacity;
  // A number that is no int must not become one that is allowed.
  config.num_sms = static_cast<int>(std::clamp<std::int64_t>(options.num_sms, -1, INT_MAX));
  config.memory_mode = options.save_products ? MemoryMode::saved : MemoryMode::recompute;
  config.overlap = options.overlap_comm ? Overlap::on : Overlap::off;
  config.weight_gradient_mode =
      options.main_grad ? WeightGradientMode::accumulate_fp32 : WeightGradientMode::store_bf16;
  config.backend = x.is_cuda() ? Backend::cuda : Backend::cpu;
  validate(config, num_ranks);

  arguments.x_TH = as_rows("x", x);
  arguments.ids_TK = as_ids(expert_ids, config.shape.num_experts);
  arguments.weights_TK = as_matrix("weights", weights);
  arguments.num_tokens = arguments.x_TH.sizes()[0];
  const auto fused = split_gate_up(const_view("gate_up", gate_up), gated);
  arguments.input = {const_view("x", arguments.x_TH),
                     const_view("expert_ids", arguments.ids_TK),
                     const_view("weights", arguments.weights_TK),
                     {fused.gate, fused.up, const_view("down", down)}};
  return arguments;
}

/// Collective, as all that follows.
std::unique_ptr<PendingCall> run_forward(const std::shared_ptr<Group>& group,
                                         const Arguments& arguments, const LocalOutcome& outcome,
                                         const Place& place, const TensorView& y) {
  auto call = std::make_unique<PendingCall>();
  call->group = group;
  call->layer = place.on_host() ? group->layer_for(arguments.config, arguments.num_tokens, outcome)
                                : group->device_layer_for(arguments.config, arguments.num_tokens,
                                                          outcome, {place.device, place.stream});
  call->context = call->layer->layer.forward(arguments.input, {y}, place.stream);
  const std::int32_t num_experts = arguments.config.shape.num_experts / group->size();
  if (place.on_host()) {
    const std::int64_t* rows = call->context.rows_per_expert();
    call->rows_per_expert.assign(rows, rows + num_experts);
  } else {
    call->rows_per_expert.assign(num_experts, -1);
  }
  return call;
}

/// The main_grad tensors are only written by the backward call; here they say that it will.
std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& expert_ids, const Tensor& weights,
                                   const Tensor& gate_up, const Tensor& down,
                                   std::optional<Tensor> gate_up_main_grad,
                                   std::optional<Tensor> down_main_grad, std::string group_name,
                                   std::string activation, double activation_limit,
                                   bool save_products, bool overlap_comm, std::int64_t max_tokens,
                                   std::int64_t row_capacity, std::int64_t num_sms) {
  const Options options{group_name,    activation,   activation_limit,
                        save_products, overlap_comm, gate_up_main_grad.has_value(),
                        max_tokens,    row_capacity, num_sms};
  const std::shared_ptr<Group> group = find_group(options.group);
  const auto entered = group->enter();
  const Place place(x);
  Arguments arguments;
  std::optional<Tensor> y;
  TensorView y_view;
  const LocalOutcome outcome = outcome_of([&] {
    if (gate_up_main_grad.has_value() != down_main_grad.has_value()) {
      throw Error(ErrorCode::invalid_argument, "main_grads must be given for gate_up and for down");
    }
    arguments = prepare(x, expert_ids, weights, gate_up, down, options, group->size());
    y = empty(x, sizes_of(x));
    y_view = view("y", as_matrix("y", *y));
  });
  std::unique_ptr<PendingCall> call = run_forward(group, arguments, outcome, place, y_view);
  const auto num_experts = static_cast<std::int64_t>(call->rows_per_expert.size());
  Tensor call_tensor = torch::stable::from_blob(
      keep_call(std::move(call)), {num_experts}, {1},
      torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Long, &release_call);
  return {*y, call_tensor};
}

/// What the backward operators write.
struct Gradients {
  Tensor dx;
  Tensor dweights;
  BackwardOutput output;
};

/// `gate_up_gradient` and `down_gradient` are written in the mode that the options ask for.
std::tuple<Tensor, Tensor> run_backward(const Tensor& dy, const Tensor& call_tensor,
                                        const Tensor& x, const Tensor& expert_ids,
                                        const Tensor& weights, const Tensor& gate_up,
                                        const Tensor& down, const Tensor& gate_up_gradient,
                                        const Tensor& down_gradient, const Options& options) {
  const std::shared_ptr<Group> group = find_group(options.group);
  const auto entered = group->enter();
  const Place place(x);
  Arguments arguments;
  std::optional<Gradients> gradients;
  std::optional<Tensor> dy_TH;
  PendingCall* call = find_call(call_tensor.const_data_ptr());
  const LocalOutcome outcome = outcome_of([&] {
    arguments = prepare(x, expert_ids, weights, gate_up, down, options, group->size());
    check_sizes("dy", dy, sizes_of(x), "of x");
    dy_TH = as_rows("dy", dy);
    gradients = Gradients{empty(x, sizes_of(x)), empty(weights, sizes_of(weights)), {}};
    const bool gated = is_gated(arguments.config.activation.kind);
    const auto fused = split_gate_up(view("gradient of gate_up", gate_up_gradient), gated);
    gradients->output = {view("dx", as_matrix("dx", gradients->dx)),
                         view("dweights", as_matrix("dweights", gradients->dweights)),
                         {fused.gate, fused.up, view("gradient of down", down_gradient)}};
  });

  // On CUDA nobody asks the peers: what keeps saved tensors on one rank does so on all.
  bool is_lost = call == nullptr;
  if (place.on_host()) {
    is_lost = group->any_rank(is_lost, outcome);
  } else {
    group->throw_after_refusal(outcome, place.stream);
  }
  std::unique_ptr<PendingCall> rerun;
  if (is_lost) {
    Tensor y = empty(arguments.x_TH, sizes_of(arguments.x_TH));
    rerun = run_forward(group, arguments, outcome, place, view("y", y));
    call = rerun.get();
  }
  call->layer->layer.backward(
      call->context, {arguments.input.x, const_view("dy", *dy_TH), arguments.input.experts},
      gradients->output, place.stream);
  return {gradients->dx, gradients->dweights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& dy, const Tensor& call, const Tensor& x, const Tensor& expert_ids,
    const Tensor& weights, const Tensor& gate_up, const Tensor& down, std::string group,
    std::string activation, double activation_limit, bool save_products, bool overlap_comm,
    std::int64_t max_tokens, std::int64_t row_capacity, std::int64_t num_sms) {
  Tensor gate_up_gradient = empty(gate_up, sizes_of(gate_up));
  Tensor down_gradient = empty(down, sizes_of(down));
  const auto [dx, dweights] =
      run_backward(dy, call, x, expert_ids, weights, gate_up, down, gate_up_gradient, down_gradient,
                   {group, activation, activation_limit, save_products, overlap_comm,
                    /*main_grad=*/false, max_tokens, row_capacity, num_sms});
  return {dx, dweights, gate_up_gradient, down_gradient};
}

std::tuple<Tensor, Tensor> backward_main_grad(
    const Tensor& dy, const Tensor& call, const Tensor& x, const Tensor& expert_ids,
    const Tensor& weights, const Tensor& gate_up, const Tensor& down,
    const Tensor& gate_up_main_grad, const Tensor& down_main_grad, std::string group,
    std::string activation, double activation_limit, bool save_products, bool overlap_comm,
    std::int64_t max_tokens, std::int64_t row_capacity, std::int64_t num_sms) {
  return run_backward(dy, call, x, expert_ids, weights, gate_up, down, gate_up_main_grad,
                      down_main_grad,
                      {group, activation, activation_limit, save_products, overlap_comm,
                       /*main_grad=*/true, max_tokens, row_capacity, num_sms});
}

Tensor all_reduce_sum(const Tensor& values, std::string group_name) {
  const std::shared_ptr<Group> group = find_group(group_name);
  const auto entered = group->enter();
  Tensor sum = torch::stable::contiguous(torch::stable::clone(values));
  if (dtype_of("values", sum) != DType::fp32) {
    throw Error(ErrorCode::invalid_argument, "values must be fp32");
  }
  group->all_reduce_sum(static_cast<float*>(sum.mutable_data_ptr()),
                        static_cast<std::size_t>(sum.numel()));
  return sum;
}

/// Ranks of several hosts meet at `rendezvous`, which is empty where all are on one.
void make_group(std::string name, std::string shared_name, std::string rendezvous,
                std::string host_name, std::int64_t rank, std::int64_t num_ranks,
                double entry_deadline_s, double inner_deadline_s, std::int64_t network_groups,
                std::int64_t network_ctas) {
  std::shared_ptr<Communicator> communicator;
  if (num_ranks == 1) {
    communicator = std::move(make_thread_communicators(1).front());
  } else if (!rendezvous.empty()) {
    communicator = make_network_communicator({.rank = static_cast<int>(rank),
                                              .num_ranks = static_cast<int>(num_ranks),
                                              .rendezvous = rendezvous,
                                              .host_name = host_name},
                                             entry_deadline_s);
  } else {
    communicator = make_process_communicator(shared_name, static_cast<int>(rank),
                                             static_cast<int>(num_ranks), entry_deadline_s);
  }
  put_group(name,
            std::make_shared<Group>(std::move(communicator), entry_deadline_s, inner_deadline_s,
                                    on_cuda_device({static_cast<int>(network_groups),
                                                    static_cast<int>(network_ctas)})));
}

void reserve(std::string group_name, std::int64_t max_tokens) {
  const std::shared_ptr<Group> group = find_group(group_name);
  const auto entered = group->enter();
  group->reserve(max_tokens);
}

/// What layers have found comes before what routers have: nothing where neither has run.
void check(std::string group_name) {
  const auto stream_of = [](int device) { return current_stream(device); };
  LocalOutcome of_layers;
  if (has_group(group_name)) {
    const std::shared_ptr<Group> group = find_group(group_name);
    const auto entered = group->enter();
    of_layers = outcome_of([&] { group->check(stream_of); });
  }
  const LocalOutcome of_routers = check_routers(stream_of);
  throw_if_failed(of_layers, 0, 0);
  throw_if_failed(of_routers, 0, 0);
}

/// Why the backend cannot run here, or "" where it can.
std::string backend_refusal(std::string backend) {
  LayerConfig config;
  config.shape = {1, 64, 64, 1, 1};
  config.backend = backend == "cuda" ? Backend::cuda : Backend::cpu;
  const LocalOutcome outcome = outcome_of([&] {
    validate(config, 1);
    if (config.backend == Backend::cpu) return;
    const int num_devices = num_cuda_devices();
    if (num_devices == 0) {
      throw Error(ErrorCode::unsupported, "backend cuda: this process can use no CUDA device");
    }
    // Says what a device lacks.
    const auto alone = make_thread_communicators(1);
    make_cuda_communicator(*alone.front(), 0);
  });
  return outcome.failed == 0 ? "" : outcome.message.data();
}

}  // namespace
}  // namespace megamoe::torch_ops

#define MEGAMOE_OPTIONS \
  "str group, str activation, float activation_limit, bool save_products, bool overlap_comm, "
#define MEGAMOE_LIMITS "int max_tokens, int row_capacity, int num_sms"
#define MEGAMOE_INPUTS "Tensor x, Tensor expert_ids, Tensor weights, Tensor gate_up, Tensor down, "

STABLE_TORCH_LIBRARY(megamoe, library) {
  library.def("forward(" MEGAMOE_INPUTS
              "Tensor? gate_up_main_grad, Tensor? down_main_grad, " MEGAMOE_OPTIONS MEGAMOE_LIMITS
              ") -> (Tensor y, Tensor call)");
  library.def("backward(Tensor dy, Tensor call, " MEGAMOE_INPUTS MEGAMOE_OPTIONS MEGAMOE_LIMITS
              ") -> (Tensor dx, Tensor dweights, Tensor dgate_up, Tensor ddown)");
  library.def(
      "backward_main_grad(Tensor dy, Tensor call, " MEGAMOE_INPUTS
      "Tensor(a!) gate_up_main_grad, Tensor(b!) down_main_grad, " MEGAMOE_OPTIONS MEGAMOE_LIMITS
      ") -> (Tensor dx, Tensor dweights)");
  library.def("all_reduce_sum(Tensor values, str group) -> Tensor");
  library.def(
      "make_group(str name, str shared_name, str rendezvous, str host_name, int rank, int "
      "num_ranks, "
      "float entry_deadline_s, "
      "float inner_deadline_s, int network_groups, int network_ctas) -> ()");
  library.def("reserve(str name, int max_tokens) -> ()");
  library.def("check(str name) -> ()");
  library.def("drop_group(str name) -> ()");
  library.def("has_group(str name) -> bool");
  library.def("num_kept_calls() -> int");
  library.def("backend_refusal(str backend) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(megamoe, CPU, library) {
  library.impl("forward", TORCH_BOX(&megamoe::torch_ops::forward));
  library.impl("backward", TORCH_BOX(&megamoe::torch_ops::backward));
  library.impl("backward_main_grad", TORCH_BOX(&megamoe::torch_ops::backward_main_grad));
  library.impl("all_reduce_sum", TORCH_BOX(&megamoe::torch_ops::all_reduce_sum));
}

// The library itself says what it cannot run there.
STABLE_TORCH_LIBRARY_IMPL(megamoe, CUDA, library) {
  library.impl("forward", TORCH_BOX(&megamoe::torch_ops::forward));
  library.impl("backward", TORCH_BOX(&megamoe::torch_ops::backward));
  library.impl("backward_main_grad", TORCH_BOX(&megamoe::torch_ops::backward_main_grad));
}

STABLE_TORCH_LIBRARY_IMPL(megamoe, CompositeExplicitAutograd, library) {
  library.impl("make_group", TORCH_BOX(&megamoe::torch_ops::make_group));
  library.impl("reserve", TORCH_BOX(&megamoe::torch_ops::reserve));
  library.impl("check", TORCH_BOX(&megamoe::torch_ops::check));
  library.impl("drop_group", TORCH_BOX(&megamoe::torch_ops::drop_group));
  library.impl("has_group", TORCH_BOX(&megamoe::torch_ops::has_group));
  library.impl("num_kept_calls", TORCH_BOX(&megamoe::torch_ops::num_kept_calls));
  library.impl("backend_refusal", TORCH_BOX(&megamoe::torch_ops::backend_refusal));
}
