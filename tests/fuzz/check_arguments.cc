#include <array>
#include <set>
#include <vector>

#include "checks.h"
#include "layer/validate.h"
#include "megamoe/error.h"

namespace megamoe::fuzz {
namespace {

constexpr DType kDTypes[] = {DType::bf16, DType::fp16,  DType::fp32,
                             DType::fp64, DType::int32, DType::int64};

enum class Access : std::uint8_t { read, write };

__extension__ using Wide = __int128;

/// What an accepted tensor must be. Sizes are small once they are right.
struct Wanted {
  const char* name;
  const ConstTensorView* view;
  DType dtype;
  std::vector<std::int64_t> sizes;
  Access access;
};

alignas(8) std::array<std::byte, 64> some_memory;

/// A contiguous view with some members off. Nothing is ever read through it.
template <class View>
View read_view(ByteReader& input, DType dtype, const std::vector<std::int64_t>& sizes) {
  View view;
  if (input.byte() >= 250) return view;
  view.data = some_memory.data();
  if (input.byte() >= 250) view.data = nullptr;
  if (input.byte() >= 250) view.data = some_memory.data() + input.byte() % 8;
  view.dtype = input.byte() >= 250 ? kDTypes[input.byte() % std::size(kDTypes)] : dtype;
  view.num_dims = static_cast<int>(sizes.size());
  if (input.byte() >= 250) view.num_dims = static_cast<int>(input.in_range(0, kMaxTensorRank));
  std::int64_t stride = 1;
  for (int dim = static_cast<int>(sizes.size()) - 1; dim >= 0; --dim) {
    view.sizes[dim] = input.near(sizes[dim]);
    view.strides[dim] = input.near(stride);
    stride *= sizes[dim];
  }
  return view;
}

/// Why it was wrong to accept the tensor.
std::string why_unsafe(const Wanted& wanted) {
  const ConstTensorView& view = *wanted.view;
  if (view.dtype != wanted.dtype) return "another dtype";
  if (view.num_dims != static_cast<int>(wanted.sizes.size())) return "another number of dimensions";
  std::int64_t count = 1;
  for (int dim = 0; dim < view.num_dims; ++dim) {
    if (view.sizes[dim] != wanted.sizes[dim]) return "another shape";
    count *= view.sizes[dim];
  }
  if (count == 0) return "";
  if (view.data == nullptr) return "null data";
  if (reinterpret_cast<std::uintptr_t>(view.data) % dtype_bytes(view.dtype) != 0)
    return "misaligned";
  // Every element's offset, in arithmetic that cannot overflow.
  std::set<Wide> offsets;
  std::array<std::int64_t, kMaxTensorRank> index{};
  for (std::int64_t i = 0; i < count; ++i) {
    Wide offset = 0;
    for (int dim = 0; dim < view.num_dims; ++dim) {
      offset += static_cast<Wide>(index[dim]) * view.strides[dim];
    }
    if (offset < 0) return "an element before the first";
    if (offset * dtype_bytes(view.dtype) > INT64_MAX) return "an element beyond 64 bits";
    if (!offsets.insert(offset).second && wanted.access == Access::write) return "overlap";
    for (int dim = view.num_dims - 1; dim >= 0 && ++index[dim] == view.sizes[dim]; --dim) {
      index[dim] = 0;
    }
  }
  const int last = view.num_dims - 1;
  if (view.sizes[last] > 1 && view.strides[last] != 1) return "columns apart";
  return "";
}

std::string check_accepted(const std::vector<Wanted>& tensors) {
  for (const Wanted& wanted : tensors) {
    const std::string why = why_unsafe(wanted);
    if (!why.empty()) return std::string(wanted.name) + " was accepted with " + why;
  }
  return "";
}

/// The error must begin with the name of one of the tensors.
std::string check_refused(const Error& error, const std::vector<Wanted>& tensors) {
  if (error.code() != ErrorCode::invalid_argument && error.code() != ErrorCode::unsupported) {
    return "refused with " + std::string(to_string(error.code()));
  }
  for (const Wanted& wanted : tensors) {
    if (std::string(error.what()).rfind(std::string(wanted.name) + " ", 0) == 0) return "";
  }
  return std::string("refused without a name: ") + error.what();
}

struct Dims {
  std::int64_t tokens, hidden, intermediate, experts, slots;
};

ExpertWeights read_experts(ByteReader& input, const Dims& dims, bool gated) {
  ExpertWeights experts;
  const std::vector<std::int64_t> rows = {dims.experts, dims.intermediate, dims.hidden};
  if (gated) experts.gate = read_view<ConstTensorView>(input, DType::bf16, rows);
  experts.up = read_view<ConstTensorView>(input, DType::bf16, rows);
  experts.down = read_view<ConstTensorView>(input, DType::bf16,
                                            {dims.experts, dims.hidden, dims.intermediate});
  return experts;
}

void add_experts(std::vector<Wanted>& tensors, const ExpertWeights& experts, const Dims& dims,
                 bool gated) {
  const std::vector<std::int64_t> rows = {dims.experts, dims.intermediate, dims.hidden};
  if (gated) tensors.push_back({"experts.gate", &experts.gate, DType::bf16, rows, Access::read});
  tensors.push_back({"experts.up", &experts.up, DType::bf16, rows, Access::read});
  tensors.push_back({"experts.down",
                     &experts.down,
                     DType::bf16,
                     {dims.experts, dims.hidden, dims.intermediate},
                     Access::read});
}

std::string check_forward(ByteReader& input, const ExpectedShape& expected, const Dims& dims) {
  ForwardInput in;
  in.x = read_view<ConstTensorView>(input, DType::bf16, {dims.tokens, dims.hidden});
  in.expert_ids = read_view<ConstTensorView>(input, DType::int32, {dims.tokens, dims.slots});
  in.weights = read_view<ConstTensorView>(input, DType::fp32, {dims.tokens, dims.slots});
  in.experts = read_experts(input, dims, expected.gated);
  const ForwardOutput out{read_view<TensorView>(input, DType::bf16, {dims.tokens, dims.hidden})};
  // x alone says how many tokens there are.
  const std::int64_t tokens = in.x.num_dims == 2 ? in.x.sizes[0] : dims.tokens;
  const ConstTensorView y = out.y;
  std::vector<Wanted> tensors = {
      {"x", &in.x, DType::bf16, {tokens, dims.hidden}, Access::read},
      {"expert_ids", &in.expert_ids, DType::int32, {tokens, dims.slots}, Access::read},
      {"weights", &in.weights, DType::fp32, {tokens, dims.slots}, Access::read},
      {"y", &y, DType::bf16, {tokens, dims.hidden}, Access::write}};
  add_experts(tensors, in.experts, dims, expected.gated);
  try {
    const std::int64_t num_tokens = validate_forward(expected, in, out);
    if (num_tokens < 0 || num_tokens > expected.shape.max_tokens) return "accepted T out of range";
    if (num_tokens != tokens) return "returned another T";
  } catch (const Error& error) {
    return check_refused(error, tensors);
  }
  return check_accepted(tensors);
}

std::string check_backward(ByteReader& input, const ExpectedShape& expected, const Dims& dims) {
  BackwardInput in;
  in.x = read_view<ConstTensorView>(input, DType::bf16, {dims.tokens, dims.hidden});
  in.dy = read_view<ConstTensorView>(input, DType::bf16, {dims.tokens, dims.hidden});
  in.experts = read_experts(input, dims, expected.gated);
  const DType dtype =
      expected.weight_gradient_mode == WeightGradientMode::store_bf16 ? DType::bf16 : DType::fp32;
  const std::vector<std::int64_t> rows = {dims.experts, dims.intermediate, dims.hidden};
  const std::vector<std::int64_t> down_rows = {dims.experts, dims.hidden, dims.intermediate};
  BackwardOutput out;
  out.dx = read_view<TensorView>(input, DType::bf16, {dims.tokens, dims.hidden});
  out.dweights = read_view<TensorView>(input, DType::fp32, {dims.tokens, dims.slots});
  if (expected.gated) out.experts.gate = read_view<TensorView>(input, dtype, rows);
  out.experts.up = read_view<TensorView>(input, dtype, rows);
  out.experts.down = read_view<TensorView>(input, dtype, down_rows);

  const ConstTensorView dx = out.dx;
  const ConstTensorView dweights = out.dweights;
  const ConstTensorView dgate = out.experts.gate;
  const ConstTensorView dup = out.experts.up;
  const ConstTensorView ddown = out.experts.down;
  std::vector<Wanted> tensors = {
      {"x", &in.x, DType::bf16, {dims.tokens, dims.hidden}, Access::read},
      {"dy", &in.dy, DType::bf16, {dims.tokens, dims.hidden}, Access::read},
      {"dx", &dx, DType::bf16, {dims.tokens, dims.hidden}, Access::write},
      {"dweights", &dweights, DType::fp32, {dims.tokens, dims.slots}, Access::write},
      {"gradients of experts.up", &dup, dtype, rows, Access::write},
      {"gradients of experts.down", &ddown, dtype, down_rows, Access::write}};
  if (expected.gated) {
    tensors.push_back({"gradients of experts.gate", &dgate, dtype, rows, Access::write});
  }
  add_experts(tensors, in.experts, dims, expected.gated);
  try {
    validate_backward(expected, dims.tokens, in, out);
  } catch (const Error& error) {
    return check_refused(error, tensors);
  }
  return check_accepted(tensors);
}

}  // namespace

std::string check_arguments(ByteReader& input) {
  const bool is_forward = input.byte() % 2 == 0;
  const Dims dims{input.in_range(0, 5), input.in_range(1, 5), input.in_range(1, 5),
                  input.in_range(1, 3), input.in_range(1, 3)};
  ExpectedShape expected;
  expected.shape = {dims.tokens + input.in_range(0, 1), dims.hidden, dims.intermediate,
                    static_cast<std::int32_t>(dims.experts), static_cast<std::int32_t>(dims.slots)};
  expected.experts_per_rank = static_cast<std::int32_t>(dims.experts);
  expected.gated = input.byte() % 2 == 0;
  expected.weight_gradient_mode = static_cast<WeightGradientMode>(input.in_range(0, 2));
  return is_forward ? check_forward(input, expected, dims) : check_backward(input, expected, dims);
}

std::string check_config(ByteReader& input) {
  const auto int32_near = [&](std::int64_t usual) {
    return static_cast<std::int32_t>(input.near(usual));
  };
  LayerConfig config;
  config.shape = {input.near(100), input.near(64), input.near(32), int32_near(8), int32_near(2)};
  config.activation.kind = static_cast<ActivationKind>(input.in_range(0, 5));
  config.activation.limit = static_cast<float>(input.near(7));
  config.memory_mode = static_cast<MemoryMode>(input.in_range(0, 1));
  config.row_capacity = input.near(0);
  config.saved_row_capacity = input.near(0);
  config.entry_deadline_s = static_cast<double>(input.near(600));
  config.inner_deadline_s = static_cast<double>(input.near(60));
  config.num_threads = int32_near(0);
  const int num_ranks = int32_near(2);
  try {
    validate(config, num_ranks);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::invalid_argument) return "refused with another code";
    for (const char* name : {"shape.", "row_capacity", "saved_row_capacity", "num_threads",
                             "num_ranks", "deadline_s", "activation.limit"}) {
      if (std::string(error.what()).find(name) != std::string::npos) return "";
    }
    return std::string("refused without a name: ") + error.what();
  }
  const WorkspaceBytes bytes = workspace_bytes(config, num_ranks);
  if (bytes.symmetric < 0 || bytes.local < 0 || bytes.total() < 0) return "negative sizes";
  const std::int64_t capacity = resolved_row_capacity(config, num_ranks);
  if (capacity < 0 || resolved_saved_row_capacity(config, num_ranks) > capacity) {
    return "capacities do not make sense";
  }
  if (bytes.local < capacity * config.shape.hidden_dim * 2) return "too few bytes for the rows";
  return "";
}

std::string check_input(const std::uint8_t* data, std::size_t size) {
  ByteReader input(data, size);
  switch (input.byte() % 4) {
    case 0:
      return check_plan(input);
    case 1:
      return check_config(input);
    default:
      return check_arguments(input);
  }
}

}  // namespace megamoe::fuzz
