#include "verify/run.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "layer/workspace.h"
#include "megamoe/cuda.h"

namespace megamoe::verify {
namespace {

struct NamedTensor {
  const char* name;
  RawTensor LayerTensors::*tensor;
};
constexpr NamedTensor kTensors[] = {
    {"y", &LayerTensors::y},
    {"dx", &LayerTensors::dx},
    {"dweights", &LayerTensors::dweights},
    {"dgate", &LayerTensors::dgate},
    {"dup", &LayerTensors::dup},
    {"ddown", &LayerTensors::ddown},
};

/// The tensors that one rank writes, filled with what must be overwritten or added to.
LayerTensors rank_tensors(const ProblemSpec& spec, const RunOptions& options, int rank) {
  const std::int64_t num_tokens = spec.tokens_per_rank[rank];
  const std::int64_t num_experts = spec.num_experts / spec.num_ranks();
  const bool accumulates = options.weight_gradient_mode == WeightGradientMode::accumulate_fp32;
  const DType gradient_dtype =
      options.weight_gradient_mode == WeightGradientMode::store_bf16 ? DType::bf16 : DType::fp32;
  LayerTensors tensors;
  tensors.y = {DType::bf16, {num_tokens, spec.hidden_dim}};
  tensors.dx = {DType::bf16, {num_tokens, spec.hidden_dim}};
  tensors.dweights = {DType::fp32, {num_tokens, spec.top_k}};
  if (is_gated(spec.activation.kind)) {
    tensors.dgate = {gradient_dtype, {num_experts, spec.intermediate_dim, spec.hidden_dim}};
  }
  tensors.dup = {gradient_dtype, {num_experts, spec.intermediate_dim, spec.hidden_dim}};
  tensors.ddown = {gradient_dtype, {num_experts, spec.hidden_dim, spec.intermediate_dim}};
  if (accumulates) {
    for (RawTensor* gradient : {&tensors.dgate, &tensors.dup, &tensors.ddown}) {
      gradient->fill(options.initial_gradient);
    }
  }
  return tensors;
}

Backend& mutable_default_backend() {
  static Backend backend = Backend::cpu;
  return backend;
}

std::atomic<int>& mutable_num_groups_over_hosts() {
  static std::atomic<int> number = 0;
  return number;
}

int& mutable_default_num_hosts() {
  static int num_hosts = 1;
  return num_hosts;
}

CudaHostsOptions& mutable_default_cuda_hosts() {
  static CudaHostsOptions options;
  return options;
}

/// Rows of `values`, whose rows have `width` elements, as a [num_rows, width] view.
template <class T>
ConstTensorView row_range(const std::vector<T>& values, std::int64_t first_row,
                          std::int64_t num_rows, std::int64_t width) {
  return tensor_view(values.data() + first_row * width, {num_rows, width});
}

}  // namespace

Backend default_backend() { return mutable_default_backend(); }
void set_default_backend(Backend backend) { mutable_default_backend() = backend; }
int num_groups_over_hosts() { return mutable_num_groups_over_hosts(); }
int default_num_hosts() { return mutable_default_num_hosts(); }
void set_default_num_hosts(int num_hosts) { mutable_default_num_hosts() = num_hosts; }
const CudaHostsOptions& default_cuda_hosts() { return mutable_default_cuda_hosts(); }
void set_default_cuda_hosts(const CudaHostsOptions& options) {
  mutable_default_cuda_hosts() = options;
}

Topology topology_of(const ProblemSpec& spec, const RunOptions& options) {
  const int num_ranks = spec.num_ranks();
  int num_hosts = options.num_hosts;
  if (num_hosts == 0) {
    num_hosts = mutable_default_num_hosts();
    if (num_ranks % num_hosts != 0) num_hosts = 1;
  }
  if (num_ranks % num_hosts != 0) {
    throw std::logic_error("topology_of: " + std::to_string(num_ranks) +
                           " ranks do not divide among " + std::to_string(num_hosts) + " hosts");
  }
  return even_topology(num_hosts, num_ranks / num_hosts);
}

RawTensor::RawTensor(DType element_type, std::vector<std::int64_t> sizes)
    : dtype(element_type), shape(std::move(sizes)) {
  bytes.resize(num_elements() * dtype_bytes(dtype));
  fill_with_nan();
}

std::int64_t RawTensor::num_elements() const {
  if (shape.empty()) return 0;
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

TensorView RawTensor::view() {
  TensorView view;
  view.data = bytes.data();
  view.dtype = dtype;
  view.num_dims = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int dim = view.num_dims - 1; dim >= 0; --dim) {
    view.sizes[dim] = shape[dim];
    view.strides[dim] = stride;
    stride *= shape[dim];
  }
  return view;
}

void RawTensor::fill_with_nan() { std::fill(bytes.begin(), bytes.end(), std::byte{0xff}); }

void RawTensor::fill(float value) {
  for (std::size_t offset = 0; offset < bytes.size(); offset += sizeof(value)) {
    std::memcpy(&bytes[offset], &value, sizeof(value));
  }
}

void RawTensor::append(const RawTensor& next) {
  if (next.shape.empty()) return;
  if (shape.empty()) {
    *this = next;
    return;
  }
  shape[0] += next.shape[0];
  bytes.insert(bytes.end(), next.bytes.begin(), next.bytes.end());
}

HostTensor RawTensor::to_host() const {
  HostTensor host;
  host.shape = shape;
  host.values.resize(num_elements());
  const auto convert = [&]<class T>(T element, auto to_double) {
    for (std::size_t i = 0; i < host.values.size(); ++i) {
      std::memcpy(&element, &bytes[i * sizeof(T)], sizeof(T));
      host.values[i] = to_double(element);
    }
  };
  switch (dtype) {
    case DType::bf16:
      convert(bf16{}, [](bf16 value) { return static_cast<double>(to_float(value)); });
      return host;
    case DType::fp32:
      convert(float{}, [](float value) { return static_cast<double>(value); });
      return host;
    case DType::int32:
      convert(std::int32_t{}, [](std::int32_t value) { return static_cast<double>(value); });
      return host;
    default:
      throw std::logic_error("RawTensor::to_host: no conversion from " +
                             std::string(to_string(dtype)));
  }
}

LayerConfig layer_config(const ProblemSpec& spec, const RunOptions& options) {
  LayerConfig config;
  config.shape = {std::max<std::int64_t>(1, spec.max_tokens()), spec.hidden_dim,
                  spec.intermediate_dim, spec.num_experts, spec.top_k};
  config.activation = spec.activation;
  config.memory_mode = options.memory_mode;
  config.overlap = options.overlap;
  config.weight_gradient_mode = options.weight_gradient_mode;
  config.backend = options.backend;
  config.row_capacity = options.row_capacity != 0
                            ? options.row_capacity
                            : spec.num_ranks() * config.shape.max_tokens * spec.top_k;
  config.saved_row_capacity = options.saved_row_capacity;
  config.entry_deadline_s = options.deadline_s;
  config.inner_deadline_s = options.deadline_s;
  config.num_threads = options.num_threads;
  return config;
}

std::string differing_tensors(const LayerTensors& left, const LayerTensors& right) {
  std::string names;
  for (const auto& [name, tensor] : kTensors) {
    if (left.*tensor == right.*tensor) continue;
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return names;
}

namespace {

/// Of launched ranks those of a host have its devices; threads of this process share what it sees.
int device_of(int rank, int num_ranks, const RunOptions& options) {
  return options.group == nullptr ? cuda_device_of(rank, num_ranks)
                                  : cuda_device_of(options.group->topology(), rank);
}

}  // namespace

RankSession::RankSession(const Problem& problem, const RunOptions& options,
                         Communicator& communicator)
    : data_(problem, options, communicator.rank()),
      group_(communicator, options),
      workspace_(layer_config(problem.spec, options), group_.get()),
      layer_(layer_config(problem.spec, options), group_.get(), workspace_) {
  // Fresh memory is zero and hides what is read before it is written.
  poison(workspace_);
  group_.get().barrier("every rank's workspace is full of NaN", 60.0);
}

BackendGroup::BackendGroup(Communicator& group, const RunOptions& options) : group_(group) {
  if (group.topology().num_hosts() > 1) ++mutable_num_groups_over_hosts();
  if (options.backend != Backend::cuda) return;
  const int device = device_of(group.rank(), group.size(), options);
  owned_ = make_cuda_communicator(group, device, options.cuda_hosts);
}

RankData::RankData(const Problem& problem, const RunOptions& options, int rank)
    : problem_(problem),
      rank_(rank),
      weight_gradient_mode_(options.weight_gradient_mode),
      tensors_(rank_tensors(problem.spec, options, rank)),
      copies_(options.backend == Backend::cuda ? std::make_unique<DeviceCopies>(device_of(
                                                     rank, problem.spec.num_ranks(), options))
                                               : nullptr) {}

ForwardInput RankData::forward_input() const {
  const ProblemSpec& spec = problem_.spec;
  const std::int64_t first = spec.first_token(rank_);
  const std::int64_t count = spec.tokens_per_rank[rank_];
  ForwardInput input;
  input.x = backward_input().x;
  input.expert_ids = row_range(problem_.expert_ids_TK, first, count, spec.top_k);
  input.weights = row_range(problem_.weights_TK, first, count, spec.top_k);
  input.experts = backward_input().experts;
  return input;
}

BackwardInput RankData::backward_input() const {
  const ProblemSpec& spec = problem_.spec;
  const std::int64_t first = spec.first_token(rank_);
  const std::int64_t count = spec.tokens_per_rank[rank_];
  const std::int64_t experts_per_rank = spec.num_experts / spec.num_ranks();
  const std::int64_t offset = rank_ * experts_per_rank * spec.intermediate_dim * spec.hidden_dim;
  BackwardInput input;
  input.x = row_range(problem_.x_TH, first, count, spec.hidden_dim);
  input.dy = row_range(problem_.dy_TH, first, count, spec.hidden_dim);
  if (x_rows_) x_rows_->read_by(input.x);
  if (dy_rows_) dy_rows_->read_by(input.dy);
  if (is_gated(spec.activation.kind)) {
    input.experts.gate = tensor_view(problem_.gate_EIH.data() + offset,
                                     {experts_per_rank, spec.intermediate_dim, spec.hidden_dim});
  }
  input.experts.up = tensor_view(problem_.up_EIH.data() + offset,
                                 {experts_per_rank, spec.intermediate_dim, spec.hidden_dim});
  input.experts.down = tensor_view(problem_.down_EHI.data() + offset,
                                   {experts_per_rank, spec.hidden_dim, spec.intermediate_dim});
  return input;
}

void RankData::SpreadRows::read_by(ConstTensorView& rows) const {
  rows.data = memory.data() + offset;
  rows.strides[0] = stride;
}

RankData::SpreadRows RankData::spread(const ConstTensorView& rows, std::int64_t stride,
                                      std::int64_t offset) {
  const std::int64_t width = rows.sizes[1];
  const auto* from = static_cast<const bf16*>(rows.data);
  SpreadRows spread{{}, stride, offset};
  spread.memory.assign(offset + rows.sizes[0] * stride + width, bf16{0xffff});
  for (std::int64_t row = 0; row < rows.sizes[0]; ++row) {
    std::copy_n(from + row * rows.strides[0], width, &spread.memory[offset + row * stride]);
  }
  return spread;
}

void RankData::spread_x(std::int64_t stride, std::int64_t offset) {
  x_rows_ = spread(backward_input().x, stride, offset);
}

void RankData::spread_dy(std::int64_t stride, std::int64_t offset) {
  dy_rows_ = spread(backward_input().dy, stride, offset);
}

ForwardOutput RankData::forward_output() { return {tensors_.y.view()}; }

BackwardOutput RankData::backward_output() {
  return {tensors_.dx.view(),
          tensors_.dweights.view(),
          {tensors_.dgate.view(), tensors_.dup.view(), tensors_.ddown.view()}};
}

CallContext RankData::forward(MoeLayer& layer) {
  tensors_.y.fill_with_nan();
  ForwardInput input = forward_input();
  ForwardOutput output = forward_output();
  if (copies_ == nullptr) return layer.forward(input, output);
  input.x = copies_->upload(input.x);
  input.expert_ids = copies_->upload(input.expert_ids);
  input.weights = copies_->upload(input.weights);
  input.experts = upload(input.experts);
  output.y = copies_->upload(output.y);
  CallContext context = layer.forward(input, output, copies_->stream());
  check_and_download(layer, {&LayerTensors::y});
  return context;
}

void RankData::check_and_download(MoeLayer& layer,
                                  std::initializer_list<RawTensor LayerTensors::*> tensors) {
  const auto download = [&] {
    for (RawTensor LayerTensors::*tensor : tensors) copies_->download((tensors_.*tensor).view());
  };
  try {
    layer.check(copies_->stream());
  } catch (...) {
    download();  // what a failed call has written, if anything
    throw;
  }
  download();
}

ExpertWeights RankData::upload(const ExpertWeights& experts) {
  return {copies_->upload(experts.gate), copies_->upload(experts.up),
          copies_->upload(experts.down)};
}

void RankData::backward(MoeLayer& layer, const CallContext& context) {
  tensors_.dx.fill_with_nan();
  tensors_.dweights.fill_with_nan();
  if (weight_gradient_mode_ != WeightGradientMode::accumulate_fp32) {
    for (RawTensor* gradient : {&tensors_.dgate, &tensors_.dup, &tensors_.ddown}) {
      gradient->fill_with_nan();
    }
  }
  BackwardInput input = backward_input();
  BackwardOutput output = backward_output();
  if (copies_ == nullptr) return layer.backward(context, input, output);
  input.x = copies_->upload(input.x);
  input.dy = copies_->upload(input.dy);
  input.experts = upload(input.experts);
  TensorView* const outputs[] = {&output.dx, &output.dweights, &output.experts.gate,
                                 &output.experts.up, &output.experts.down};
  for (TensorView* tensor : outputs) *tensor = copies_->upload(*tensor);
  layer.backward(context, input, output, copies_->stream());
  check_and_download(layer, {&LayerTensors::dx, &LayerTensors::dweights, &LayerTensors::dgate,
                             &LayerTensors::dup, &LayerTensors::ddown});
}

LayerTensors concatenate(const std::vector<LayerTensors>& tensors_R) {
  LayerTensors all;
  for (const LayerTensors& tensors : tensors_R) {
    for (const auto& [name, tensor] : kTensors) (all.*tensor).append(tensors.*tensor);
  }
  return all;
}

namespace {

/// Every rank's tensor, of the shapes that tensors_R already have; this rank's is filled in.
void gather(Communicator& group, RawTensor LayerTensors::*tensor, double deadline_s,
            std::vector<LayerTensors>& tensors_R) {
  std::size_t most_bytes = 0;
  for (const LayerTensors& tensors : tensors_R) {
    most_bytes = std::max(most_bytes, (tensors.*tensor).bytes.size());
  }
  std::vector<std::byte> mine = (tensors_R[group.rank()].*tensor).bytes;
  mine.resize(most_bytes);
  std::vector<std::byte> all(most_bytes * tensors_R.size());
  group.all_gather(mine.data(), all.data(), most_bytes, "the results of all ranks", deadline_s);
  for (std::size_t rank = 0; rank < tensors_R.size(); ++rank) {
    std::vector<std::byte>& bytes = (tensors_R[rank].*tensor).bytes;
    std::copy_n(all.data() + rank * most_bytes, bytes.size(), bytes.data());
  }
}

/// This process's part of run_layer(), where ranks are processes.
LayerTensors run_rank(const Problem& problem, const RunOptions& options) {
  RankSession session(problem, options, *options.group);
  const CallContext context = session.forward();
  session.backward(context);
  std::vector<LayerTensors> tensors_R;
  for (int rank = 0; rank < options.group->size(); ++rank) {
    tensors_R.push_back(rank_tensors(problem.spec, options, rank));
  }
  tensors_R[options.group->rank()] = session.tensors();
  for (const auto& [name, tensor] : kTensors) {
    gather(*options.group, tensor, options.deadline_s, tensors_R);
  }
  return concatenate(tensors_R);
}

}  // namespace

LayerTensors run_layer(const Problem& problem, const RunOptions& options) {
  if (options.group != nullptr) return run_rank(problem, options);
  std::vector<LayerTensors> tensors_R(problem.spec.num_ranks());
  run_ranks(topology_of(problem.spec, options), [&](Communicator& communicator) {
    RankSession session(problem, options, communicator);
    const CallContext context = session.forward();
    session.backward(context);
    tensors_R[communicator.rank()] = session.tensors();
  });
  return concatenate(tensors_R);
}

}  // namespace megamoe::verify
