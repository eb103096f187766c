// The ranks of a group on one GPU, in one process: each with memory and a stream of its own.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "gpu/device_buffers.cuh"
#include "gpu/host_ranks.h"
#include "kernels/exchange/exchange.h"
#include "kernels/launch.h"
#include "kernels/plan/plan.h"
#include "kernels/reduce/reduce.h"

namespace megamoe::testing {

enum class Pull { through_registers, in_bulk };

constexpr std::uint64_t kForwardCall = 1;
constexpr std::uint64_t kBackwardCall = 2;

struct GpuRank {
  explicit GpuRank(const WorkspaceDims& dims, int rank)
      : view(gpu::make_rank_view(dims, rank)),
        capacity(padded_row_capacity(dims)),
        symmetric(view.symmetric.bytes),
        scratch(view.scratch_layout.bytes),
        plan(view.plan_layout.bytes),
        ids(dims.max_tokens * id_stride(dims)),
        weights(dims.max_tokens * weight_stride(dims)),
        x(dims.max_tokens * row_stride(dims)),
        dy(dims.max_tokens * row_stride(dims)),
        x_CH(capacity * dims.hidden_dim),
        dy_CH(capacity * dims.hidden_dim),
        weight_C(capacity),
        origin_C(capacity),
        results_CH(capacity * dims.hidden_dim),
        dweight_segments(capacity * num_dweight_segments(dims.intermediate_dim)),
        out(dims.max_tokens * row_stride(dims)),
        dweights(dims.max_tokens * id_stride(dims)) {
    check_cuda(cudaMemset(symmetric.data(), 0, symmetric.size()), "signals");
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&view.failure), sizeof(*view.failure),
                             cudaHostAllocMapped),
               "failure record");
    std::memset(static_cast<void*>(view.failure), 0, sizeof(*view.failure));
    view.scratch = scratch.data();
    view.entry_deadline_ns = 5'000'000'000;
    view.inner_deadline_ns = 5'000'000'000;
    gpu::reset_control(view, stream);
    check_cuda(cudaStreamSynchronize(stream), "reset_control");
  }
  GpuRank(const GpuRank&) = delete;
  GpuRank& operator=(const GpuRank&) = delete;
  ~GpuRank() {
    cudaStreamDestroy(stream);
    cudaFreeHost(view.failure);
  }

  [[nodiscard]] gpu::RowsInput x_input() const { return {x.data(), row_stride(view.dims)}; }
  [[nodiscard]] gpu::RowsInput dy_input() const { return {dy.data(), row_stride(view.dims)}; }
  [[nodiscard]] gpu::RowsOutput output() const { return {out.data(), row_stride(view.dims)}; }
  [[nodiscard]] gpu::RoutingInput routing_input() const {
    return {ids.data(), id_stride(view.dims), weights.data(), weight_stride(view.dims)};
  }
  [[nodiscard]] gpu::DweightSegments segments() const {
    return {dweight_segments.data(), capacity,
            static_cast<std::int32_t>(num_dweight_segments(view.dims.intermediate_dim))};
  }

  void poison() {
    const std::int64_t begin = view.symmetric.exchange.staged_rows_TH.offset;
    check_cuda(cudaMemset(symmetric.data() + begin, 0xff, symmetric.size() - begin), "poison");
    const std::int64_t control_bytes = view.scratch_layout.block_rows_BE.offset;
    check_cuda(cudaMemset(scratch.data() + control_bytes, 0xff, scratch.size() - control_bytes),
               "poison");
    x_CH.poison();
    dy_CH.poison();
    weight_C.poison();
    origin_C.poison();
    out.poison();
    dweights.poison();
  }

  void upload(const RankInput& input) {
    num_tokens = input.num_tokens;
    plan.poison();
    ids.upload(input.ids);
    weights.upload(input.weights);
    x.upload(input.x);
    dy.upload(input.dy);
  }
  void upload(const ExpertResults& results) {
    results_CH.upload(results.rows_CH);
    dweight_segments.upload(results.dweight_segments);
  }

  void pull(Pull how, const gpu::PulledRows& rows) {
    if (how == Pull::in_bulk) {
      gpu::pull_rows_in_bulk(view, plan.data(), rows, stream);
    } else {
      gpu::pull_rows(view, plan.data(), rows, stream);
    }
  }

  /// The launches of a forward call but for the products, whose results are uploaded before.
  void enqueue_forward(Pull how) {
    using device::Signal;
    std::byte* p = plan.data();
    gpu::stage_forward(view, x_input(), num_tokens, stream);
    gpu::count_slots(view, p, routing_input(), num_tokens, stream);
    gpu::enter_call(view, p, gpu::CallKind::forward, kForwardCall, num_tokens, stream);
    gpu::write_pull_lists(view, p, num_tokens, stream);
    gpu::meet(view, p, Signal::rows_staged, stream);
    pull(how, {x_CH.data(), nullptr, nullptr, origin_C.data()});
    gpu::push_rows(view, p, results_CH.data(), origin_C.data(), {}, stream);
    gpu::meet(view, p, Signal::results_sent, stream);
    gpu::reduce_outputs(view, p, output(), num_tokens, stream);
  }

  void enqueue_backward(Pull how) {
    using device::Signal;
    std::byte* p = plan.data();
    gpu::stage_backward(view, p, x_input(), dy_input(), num_tokens, stream);
    gpu::count_planned_slots(view, p, num_tokens, stream);
    gpu::enter_call(view, p, gpu::CallKind::backward, kBackwardCall, num_tokens, stream);
    gpu::write_pull_lists(view, p, num_tokens, stream);
    gpu::meet(view, p, Signal::rows_staged, stream);
    pull(how, {x_CH.data(), dy_CH.data(), weight_C.data(), origin_C.data()});
    gpu::push_rows(view, p, results_CH.data(), origin_C.data(), segments(), stream);
    gpu::meet(view, p, Signal::results_sent, stream);
    gpu::reduce_gradients(view, p, output(), {dweights.data(), id_stride(view.dims)}, num_tokens,
                          stream);
  }

  template <class T>
  [[nodiscard]] std::vector<T> download(const Region<T>& region) const {
    std::vector<T> values(region.count);
    check_cuda(cudaMemcpy(values.data(), region.in(plan.data()), values.size() * sizeof(T),
                          cudaMemcpyDeviceToHost),
               "download of a plan");
    return values;
  }

  gpu::RankView view;
  std::int64_t capacity;
  std::int64_t num_tokens = 0;
  cudaStream_t stream = nullptr;
  DeviceBuffer<std::byte> symmetric;
  DeviceBuffer<std::byte> scratch;
  DeviceBuffer<std::byte> plan;
  DeviceBuffer<std::int32_t> ids;
  DeviceBuffer<float> weights;
  DeviceBuffer<bf16> x;
  DeviceBuffer<bf16> dy;
  DeviceBuffer<bf16> x_CH;
  DeviceBuffer<bf16> dy_CH;
  DeviceBuffer<float> weight_C;
  DeviceBuffer<RowOrigin> origin_C;
  DeviceBuffer<bf16> results_CH;
  DeviceBuffer<float> dweight_segments;
  DeviceBuffer<bf16> out;
  DeviceBuffer<float> dweights;
};

class GpuRanks {
 public:
  explicit GpuRanks(const WorkspaceDims& dims) {
    gpu::load_exchange_kernels();
    for (int r = 0; r < dims.routing.num_ranks; ++r) {
      ranks_.push_back(std::make_unique<GpuRank>(dims, r));
    }
    for (auto& rank : ranks_) {
      for (int r = 0; r < num_ranks(); ++r) {
        rank->view.symmetric_R[r] = ranks_[r]->symmetric.data();
      }
    }
    synchronize();
  }

  void poison() {
    for (auto& rank : ranks_) rank->poison();
  }
  void upload(const std::vector<RankInput>& inputs, const std::vector<ExpertResults>& results) {
    for (int r = 0; r < num_ranks(); ++r) {
      ranks_[r]->upload(inputs[r]);
      ranks_[r]->upload(results[r]);
    }
  }
  void forward(Pull how) {
    synchronize();
    for (auto& rank : ranks_) rank->enqueue_forward(how);
    synchronize();
  }
  void backward(Pull how) {
    synchronize();
    for (auto& rank : ranks_) rank->enqueue_backward(how);
    synchronize();
  }
  void synchronize() { check_cuda(cudaDeviceSynchronize(), "kernels of the exchange"); }

  [[nodiscard]] GpuRank& rank(int r) { return *ranks_[r]; }
  [[nodiscard]] int num_ranks() const { return static_cast<int>(ranks_.size()); }

 private:
  std::vector<std::unique_ptr<GpuRank>> ranks_;
};

}  // namespace megamoe::testing
