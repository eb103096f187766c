// A group of ranks on one GPU with experts: whole calls of the layer with and without overlap, and
// a number for the bits of everything that a call leaves behind.
//
// Legend: C padded rows, H hidden, I intermediate, e experts of a rank.
#pragma once

#include <memory>
#include <vector>

#include "gpu/bit_hash.cuh"
#include "gpu/gpu_ranks.cuh"
#include "kernels/forward/forward.h"
#include "kernels/products/products.h"

namespace megamoe::testing {

enum class Overlap { off, on };

/// What a backward call has of its forward call's g and u.
enum class Memory { recompute, saved };

/// First launches load code, for which they may wait for kernels that wait for a peer.
inline void load_layer_kernels() {
  gpu::load_exchange_kernels();
  gpu::load_overlap_kernels();
  products::load_product_kernels();
}

/// The experts of one rank and what their products leave.
struct ExpertBuffers {
  explicit ExpertBuffers(const GpuRank& rank)
      : hidden(rank.view.dims.hidden_dim),
        intermediate(rank.view.dims.intermediate_dim),
        num_experts(rank.view.routing().experts_per_rank()),
        capacity(rank.capacity),
        gate_eIH(num_experts * hidden * intermediate),
        up_eIH(gate_eIH.size()),
        down_eHI(gate_eIH.size()),
        g_CI(capacity * intermediate),
        u_CI(g_CI.size()),
        kept_g_CI(g_CI.size()),
        kept_u_CI(g_CI.size()),
        a_CI(g_CI.size()),
        dg_CI(g_CI.size()),
        du_CI(g_CI.size()) {
    const float scale = 1.0F / std::sqrt(static_cast<float>(hidden));
    fill_random(gate_eIH, 11 + rank.view.rank, scale);
    fill_random(up_eIH, 21 + rank.view.rank, scale);
    fill_random(down_eHI, 31 + rank.view.rank, scale);
  }

  void poison() {
    for (DeviceBuffer<bf16>* buffer : {&g_CI, &u_CI, &a_CI, &dg_CI, &du_CI}) buffer->poison();
  }
  [[nodiscard]] TensorView rows(const DeviceBuffer<bf16>& buffer, std::int64_t columns) const {
    return tensor_view(buffer.data(), {capacity, columns});
  }
  [[nodiscard]] ConstTensorView gate() const {
    return tensor_view(static_cast<const bf16*>(gate_eIH.data()),
                       {num_experts, intermediate, hidden});
  }
  [[nodiscard]] ConstTensorView up() const {
    return tensor_view(static_cast<const bf16*>(up_eIH.data()),
                       {num_experts, intermediate, hidden});
  }
  [[nodiscard]] ConstTensorView down() const {
    return tensor_view(static_cast<const bf16*>(down_eHI.data()),
                       {num_experts, hidden, intermediate});
  }

  std::int64_t hidden;
  std::int64_t intermediate;
  std::int64_t num_experts;
  std::int64_t capacity;
  DeviceBuffer<bf16> gate_eIH;
  DeviceBuffer<bf16> up_eIH;
  DeviceBuffer<bf16> down_eHI;
  DeviceBuffer<bf16> g_CI;
  DeviceBuffer<bf16> u_CI;
  DeviceBuffer<bf16> kept_g_CI;  ///< from the forward call to the backward call
  DeviceBuffer<bf16> kept_u_CI;
  DeviceBuffer<bf16> a_CI;
  DeviceBuffer<bf16> dg_CI;
  DeviceBuffer<bf16> du_CI;
};

/// The launches of one rank's calls.
class LayerRank {
 public:
  explicit LayerRank(GpuRank& rank) : rank_(rank), experts_(rank) {}

  void enqueue_forward(Overlap overlap, const products::LaunchOptions& launch) {
    const products::LaunchOptions options = on_stream(launch);
    enqueue_forward_plan();
    if (overlap == Overlap::on) {
      gpu::order_pulls(rank_.view, plan(), forward_rows(), rank_.stream);
      gpu::gate_up_and_pull(rank_.view, plan(), activation, forward_rows(), kept_tensors(),
                            options);
      gpu::down_and_push(rank_.view, plan(), rank_.origin_C.data(), a_CI(), experts_.down(),
                         options);
    } else {
      gpu::pull_rows(rank_.view, plan(), forward_rows(), rank_.stream);
      const gpu::GateUpTensors kept = kept_tensors();
      multiply_gate_up(groups(), activation, x_CH(), kept.gate_eIH, kept.up_eIH, kept.g_CI,
                       kept.u_CI, a_CI(), options);
      multiply_down(groups(), a_CI(), experts_.down(), results_CH(), options);
      gpu::push_rows(rank_.view, plan(), rank_.results_CH.data(), rank_.origin_C.data(), {},
                     rank_.stream);
    }
    gpu::meet(rank_.view, plan(), device::Signal::results_sent, rank_.stream);
    gpu::reduce_outputs(rank_.view, plan(), rank_.output(), rank_.num_tokens, rank_.stream);
  }

  void enqueue_backward(Overlap overlap, const products::LaunchOptions& launch) {
    const products::LaunchOptions options = on_stream(launch);
    enqueue_backward_plan();
    if (overlap == Overlap::on) {
      gpu::order_pulls(rank_.view, plan(), backward_rows(), rank_.stream);
      if (memory == Memory::recompute) {
        gpu::gate_up_and_pull(rank_.view, plan(), activation, backward_rows(),
                              tensors(g_CI(), u_CI()), options);
        enqueue_gate_up_gradient(g_CI(), u_CI(), options);
      } else {
        gpu::gate_up_gradient_and_pull(rank_.view, groups(), activation, backward_rows(),
                                       experts_.down(), kept_g_CI(), kept_u_CI(), gradients(),
                                       gpu::LastPass::now, options);
      }
      gpu::dx_and_push(rank_.view, plan(), rank_.origin_C.data(), dg_CI(), du_CI(), gate(),
                       experts_.up(), options);
      gpu::push_dweights(rank_.view, plan(), rank_.origin_C.data(), rank_.segments(), rank_.stream);
    } else {
      gpu::pull_rows(rank_.view, plan(), backward_rows(), rank_.stream);
      if (memory == Memory::recompute) {
        multiply_gate_up(groups(), activation, x_CH(), gate(), experts_.up(), g_CI(), u_CI(),
                         a_CI(), options);
        enqueue_gate_up_gradient(g_CI(), u_CI(), options);
      } else {
        enqueue_gate_up_gradient(kept_g_CI(), kept_u_CI(), options);
      }
      multiply_dx(groups(), dg_CI(), du_CI(), gate(), experts_.up(), results_CH(), options);
      gpu::push_rows(rank_.view, plan(), rank_.results_CH.data(), rank_.origin_C.data(),
                     rank_.segments(), rank_.stream);
    }
    gpu::meet(rank_.view, plan(), device::Signal::results_sent, rank_.stream);
    gpu::reduce_gradients(rank_.view, plan(), rank_.output(),
                          {rank_.dweights.data(), id_stride(rank_.view.dims)}, rank_.num_tokens,
                          rank_.stream);
  }

  /// stage ... meet(rows_staged)
  void enqueue_forward_plan() {
    gpu::stage_forward(rank_.view, rank_.x_input(), rank_.num_tokens, rank_.stream);
    gpu::count_slots(rank_.view, plan(), rank_.routing_input(), rank_.num_tokens, rank_.stream);
    gpu::enter_call(rank_.view, plan(), gpu::CallKind::forward, kForwardCall, rank_.num_tokens,
                    rank_.stream);
    gpu::write_pull_lists(rank_.view, plan(), rank_.num_tokens, rank_.stream);
    gpu::meet(rank_.view, plan(), device::Signal::rows_staged, rank_.stream);
  }
  void enqueue_backward_plan() {
    gpu::stage_backward(rank_.view, plan(), rank_.x_input(), rank_.dy_input(), rank_.num_tokens,
                        rank_.stream);
    gpu::count_planned_slots(rank_.view, plan(), rank_.num_tokens, rank_.stream);
    gpu::enter_call(rank_.view, plan(), gpu::CallKind::backward, kBackwardCall, rank_.num_tokens,
                    rank_.stream);
    gpu::write_pull_lists(rank_.view, plan(), rank_.num_tokens, rank_.stream);
    gpu::meet(rank_.view, plan(), device::Signal::rows_staged, rank_.stream);
  }
  void enqueue_gate_up_gradient(const TensorView& g, const TensorView& u,
                                const products::LaunchOptions& options) {
    multiply_gate_up_gradient(groups(), activation, experts_.rows(rank_.dy_CH, experts_.hidden),
                              experts_.down(), g, u, rank_.weight_C.data(), gradients(), options);
  }

  void poison() {
    rank_.poison();
    rank_.results_CH.poison();
    rank_.dweight_segments.poison();
    experts_.poison();
  }

  /// Adds the bits of every buffer that both ways of a call write, but for rows of results, which
  /// only one of them has.
  void add_bits(unsigned long long* sum) {
    const SymmetricLayout& layout = rank_.view.symmetric.exchange;
    add_bit_hash(layout.slot_rows_TKH.in(rank_.symmetric.data()),
                 layout.slot_rows_TKH.count * sizeof(bf16), sum);
    add_bit_hash(layout.slot_dweights_TK.in(rank_.symmetric.data()),
                 layout.slot_dweights_TK.count * sizeof(float), sum + 1);
    int next = 2;
    for (const DeviceBuffer<bf16>* buffer :
         {&rank_.x_CH, &rank_.dy_CH, &rank_.out, &experts_.g_CI, &experts_.u_CI, &experts_.a_CI,
          &experts_.dg_CI, &experts_.du_CI}) {
      add_bit_hash(buffer->data(), buffer->size() * sizeof(bf16), sum + next++);
    }
    add_bit_hash(rank_.weight_C.data(), rank_.weight_C.size() * sizeof(float), sum + next++);
    add_bit_hash(rank_.origin_C.data(), rank_.origin_C.size() * sizeof(RowOrigin), sum + next++);
    add_bit_hash(rank_.dweights.data(), rank_.dweights.size() * sizeof(float), sum + next++);
    add_bit_hash(rank_.dweight_segments.data(), rank_.dweight_segments.size() * sizeof(float),
                 sum + next++);
  }
  static constexpr int kNumHashes = 14;
  static const char* name_of_hash(int hash) {
    constexpr const char* kNames[kNumHashes] = {
        "slots", "slot dweights", "x",        "dy",      "out", "g", "u", "a", "dg", "du",
        "w",     "origins",       "dweights", "segments"};
    return kNames[hash];
  }

  [[nodiscard]] GpuRank& rank() { return rank_; }
  [[nodiscard]] ExpertBuffers& experts() { return experts_; }
  [[nodiscard]] std::byte* plan() { return rank_.plan.data(); }
  [[nodiscard]] gpu::PulledRows forward_rows() {
    return {rank_.x_CH.data(), nullptr, nullptr, rank_.origin_C.data()};
  }
  [[nodiscard]] gpu::PulledRows backward_rows() {
    return {rank_.x_CH.data(), rank_.dy_CH.data(), rank_.weight_C.data(), rank_.origin_C.data()};
  }
  [[nodiscard]] gpu::GateUpTensors tensors(const TensorView& g, const TensorView& u) {
    return {gate(), experts_.up(), g, u, a_CI()};
  }
  /// Of a forward call.
  [[nodiscard]] gpu::GateUpTensors kept_tensors() {
    return memory == Memory::saved ? tensors(kept_g_CI(), kept_u_CI()) : tensors({}, {});
  }
  [[nodiscard]] products::GateUpGradientOutputs gradients() {
    return {dg_CI(), du_CI(), a_CI(), rank_.dweight_segments.data()};
  }
  [[nodiscard]] products::GroupedRows groups() {
    const CallPlanLayout& layout = rank_.view.plan_layout;
    return {layout.group_begin_e.in(plan()), layout.group_count_e.in(plan()),
            static_cast<int>(experts_.num_experts)};
  }
  [[nodiscard]] TensorView x_CH() { return experts_.rows(rank_.x_CH, experts_.hidden); }
  [[nodiscard]] TensorView results_CH() { return experts_.rows(rank_.results_CH, experts_.hidden); }
  /// What belongs to the gate is absent where there is none.
  [[nodiscard]] ConstTensorView gate() const {
    return is_gated(activation.kind) ? experts_.gate() : ConstTensorView{};
  }
  [[nodiscard]] TensorView kept_g_CI() { return if_gated(experts_.kept_g_CI); }
  [[nodiscard]] TensorView kept_u_CI() {
    return experts_.rows(experts_.kept_u_CI, experts_.intermediate);
  }
  [[nodiscard]] TensorView g_CI() { return if_gated(experts_.g_CI); }
  [[nodiscard]] TensorView u_CI() { return experts_.rows(experts_.u_CI, experts_.intermediate); }
  [[nodiscard]] TensorView a_CI() { return experts_.rows(experts_.a_CI, experts_.intermediate); }
  [[nodiscard]] TensorView dg_CI() { return if_gated(experts_.dg_CI); }
  [[nodiscard]] TensorView du_CI() { return experts_.rows(experts_.du_CI, experts_.intermediate); }

  Memory memory = Memory::recompute;
  Activation activation;

 private:
  [[nodiscard]] TensorView if_gated(const DeviceBuffer<bf16>& buffer) const {
    return is_gated(activation.kind) ? experts_.rows(buffer, experts_.intermediate) : TensorView{};
  }
  [[nodiscard]] products::LaunchOptions on_stream(products::LaunchOptions options) const {
    options.stream = rank_.stream;
    return options;
  }

  GpuRank& rank_;
  ExpertBuffers experts_;
};

/// All ranks of a group, which share the GPU's SMs.
class LayerRanks {
 public:
  explicit LayerRanks(const WorkspaceDims& dims) : ranks_(dims), hashes_(num_hashes()) {
    load_layer_kernels();
    for (int r = 0; r < ranks_.num_ranks(); ++r) {
      layers_.push_back(std::make_unique<LayerRank>(ranks_.rank(r)));
    }
    options.num_sms = gpu::num_multiprocessors() / ranks_.num_ranks() / 2 * 2;
    ranks_.synchronize();
  }

  void set(Memory memory, const Activation& activation) {
    for (auto& layer : layers_) {
      layer->memory = memory;
      layer->activation = activation;
    }
  }
  void upload(const std::vector<RankInput>& inputs) {
    for (int r = 0; r < num_ranks(); ++r) ranks_.rank(r).upload(inputs[r]);
  }
  void poison() {
    for (auto& layer : layers_) layer->poison();
  }
  void forward(Overlap overlap) {
    ranks_.synchronize();
    for (auto& layer : layers_) layer->enqueue_forward(overlap, options);
    ranks_.synchronize();
  }
  void backward(Overlap overlap) {
    ranks_.synchronize();
    for (auto& layer : layers_) layer->enqueue_backward(overlap, options);
    ranks_.synchronize();
  }
  [[nodiscard]] std::vector<unsigned long long> bits() {
    check_cuda(cudaMemset(hashes_.data(), 0, hashes_.size() * 8), "memset");
    for (int r = 0; r < num_ranks(); ++r) {
      layers_[r]->add_bits(hashes_.data() + r * LayerRank::kNumHashes);
    }
    return hashes_.download();
  }
  [[nodiscard]] bool failed() {
    for (int r = 0; r < num_ranks(); ++r) {
      if (ranks_.rank(r).view.failure->is_set != 0) return true;
    }
    return false;
  }

  [[nodiscard]] LayerRank& layer(int r) { return *layers_[r]; }
  [[nodiscard]] GpuRanks& ranks() { return ranks_; }
  [[nodiscard]] int num_ranks() const { return ranks_.num_ranks(); }

  products::LaunchOptions options;

 private:
  [[nodiscard]] std::int64_t num_hashes() const {
    return std::int64_t{ranks_.num_ranks()} * LayerRank::kNumHashes;
  }

  GpuRanks ranks_;
  std::vector<std::unique_ptr<LayerRank>> layers_;
  DeviceBuffer<unsigned long long> hashes_;
};

}  // namespace megamoe::testing
