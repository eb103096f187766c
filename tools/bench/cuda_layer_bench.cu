#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <mutex>
#include <thread>

#include "bench/cuda_layer_bench.h"
#include "bench/dense_product.h"
#include "cuda/workspace.h"
#include "layer/workspace.h"
#include "megamoe/cuda.h"
#include "megamoe/megamoe.h"
#include "verify/device_copies.h"

namespace megamoe::bench {
namespace {

using cuda::check;
using cuda::CurrentDevice;
using cuda::DeviceMemory;
using cuda::OwnedStream;

constexpr int kNumWarmups = 4;
constexpr int kNumStagePasses = 5;
// A chip lowers its clock within tens of milliseconds of full load, so what is to be compared (the
// layer, other layers, dense products) runs in bursts of about this length, each after a pause.
constexpr double kBurstMs = 40.0;
constexpr std::chrono::milliseconds kPause{200};

__device__ std::uint32_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 31)) * 0x7fb5d329728ea185ULL;
  value = (value ^ (value >> 27)) * 0x81dadef4bc2dd44dULL;
  return static_cast<std::uint32_t>(value >> 32);
}

/// About normal (a sum of four uniform numbers), of standard deviation `scale`.
__global__ void fill_kernel(bf16* values, std::int64_t count, float scale, std::uint64_t seed) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    float sum = -2.0F;
    for (int term = 0; term < 4; ++term) {
      sum += static_cast<float>(mixed(seed * 0x9e3779b97f4a7c15ULL + i * 4 + term)) * 0x1p-32F;
    }
    values[i] = to_bf16(sum * scale * 1.7320508F);
  }
}

class DeviceTensor {
 public:
  DeviceTensor(int device, std::int64_t count, std::int64_t element_bytes)
      : count_(count), memory_(device, count * element_bytes, "a benchmark's tensor") {}

  void fill(float scale, std::uint64_t seed) {
    fill_kernel<<<1024, 256>>>(reinterpret_cast<bf16*>(memory_.data()), count_, scale, seed);
    check(cudaGetLastError(), "fill");
  }
  template <class T>
  TensorView view(std::initializer_list<std::int64_t> sizes) {
    return tensor_view(reinterpret_cast<T*>(memory_.data()), sizes);
  }
  template <class T>
  void upload(const std::vector<T>& values) {
    check(cudaMemcpy(memory_.data(), values.data(), values.size() * sizeof(T),
                     cudaMemcpyHostToDevice),
          "upload");
  }

 private:
  std::int64_t count_;
  DeviceMemory memory_;
};

/// Tensors of one rank. e = E/R experts.
struct RankTensors {
  RankTensors(const LayerConfig& config, int num_ranks, int rank, int device,
              const std::vector<std::int32_t>& ids)
      : T(config.shape.max_tokens),
        H(config.shape.hidden_dim),
        I(config.shape.intermediate_dim),
        K(config.shape.top_k),
        e(config.shape.num_experts / num_ranks),
        stores_bf16(config.weight_gradient_mode == WeightGradientMode::store_bf16),
        x(device, T * H, 2),
        dy(device, T * H, 2),
        y(device, T * H, 2),
        dx(device, T * H, 2),
        ids_TK(device, T * K, 4),
        weights(device, T * K, 4),
        dweights(device, T * K, 4),
        gate(device, e * I * H, 2),
        up(device, e * I * H, 2),
        down(device, e * I * H, 2),
        dgate(device, e * I * H, stores_bf16 ? 2 : 4),
        dup(device, e * I * H, stores_bf16 ? 2 : 4),
        ddown(device, e * I * H, stores_bf16 ? 2 : 4) {
    const auto seed = static_cast<std::uint64_t>(rank) * 16;
    x.fill(1.0F, seed + 1);
    dy.fill(1.0F, seed + 2);
    gate.fill(1.0F / std::sqrt(static_cast<float>(H)), seed + 3);
    up.fill(1.0F / std::sqrt(static_cast<float>(H)), seed + 4);
    down.fill(1.0F / std::sqrt(static_cast<float>(I)), seed + 5);
    ids_TK.upload(ids);
    weights.upload(std::vector<float>(T * K, 1.0F / static_cast<float>(K)));
    check(cudaDeviceSynchronize(), "a benchmark's tensors");
  }

  ExpertWeights experts() {
    return {gate.view<bf16>({e, I, H}), up.view<bf16>({e, I, H}), down.view<bf16>({e, H, I})};
  }
  ForwardInput forward_input() {
    return {x.view<bf16>({T, H}), ids_TK.view<std::int32_t>({T, K}), weights.view<float>({T, K}),
            experts()};
  }
  ForwardOutput forward_output() { return {y.view<bf16>({T, H})}; }
  BackwardInput backward_input() {
    return {x.view<bf16>({T, H}), dy.view<bf16>({T, H}), experts()};
  }
  BackwardOutput backward_output() {
    const auto gradient = [&](DeviceTensor& tensor, std::initializer_list<std::int64_t> sizes) {
      return stores_bf16 ? tensor.view<bf16>(sizes) : tensor.view<float>(sizes);
    };
    return {dx.view<bf16>({T, H}),
            dweights.view<float>({T, K}),
            {gradient(dgate, {e, I, H}), gradient(dup, {e, I, H}), gradient(ddown, {e, H, I})}};
  }

  std::int64_t T, H, I, K, e;
  bool stores_bf16;
  DeviceTensor x, dy, y, dx, ids_TK, weights, dweights, gate, up, down, dgate, dup, ddown;
};

class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "an event"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "an event"); }
  [[nodiscard]] double ms_since(const Event& start) const {
    float ms = 0.0F;
    check(cudaEventElapsedTime(&ms, start.event_, event_), "elapsed time");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

std::map<std::string, double> medians(std::map<std::string, SamplesMs> samples) {
  std::map<std::string, double> result;
  for (const auto& [name, values] : samples) result[name] = summarize(values).median_ms;
  return result;
}

/// The sum of the waits of all CTAs so far, ms.
struct Waits {
  double start_ms = 0.0;
  double later_ms = 0.0;
};
Waits waits_of(const cuda::CudaWorkspace& workspace, cudaStream_t stream) {
  device::CallControl control{};
  check(cudaMemcpyAsync(&control, workspace.local.data(), sizeof(control), cudaMemcpyDeviceToHost,
                        stream),
        "the waits of a pass");
  check(cudaStreamSynchronize(stream), "the waits of a pass");
  return {static_cast<double>(control.start_wait_ns) * 1e-6,
          static_cast<double>(control.later_wait_ns) * 1e-6};
}

int num_multiprocessors(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  return count;
}

void add_stages(cuda::StageClock& clock, std::map<std::string, SamplesMs>& samples) {
  std::map<std::string, double> sums;
  for (const cuda::StageClock::Stage& stage : clock.take()) sums[stage.name] += stage.ms;
  for (const auto& [name, ms] : sums) samples[name].push_back(ms);
}

}  // namespace

CudaLayerTimes time_layer_on_cuda(const LayerConfig& config,
                                  const std::vector<std::vector<std::int32_t>>& ids_RTK,
                                  int num_repeats) {
  const int num_ranks = static_cast<int>(ids_RTK.size());
  CudaLayerTimes times;
  std::vector<SamplesMs> forward_RS(num_ranks, SamplesMs(num_repeats));
  std::vector<SamplesMs> backward_RS(num_ranks, SamplesMs(num_repeats));
  run_ranks(num_ranks, [&](Communicator& threads) {
    const int rank = threads.rank();
    const int device = verify::cuda_device_of(rank, num_ranks);
    const CurrentDevice current(device);
    const auto group = make_cuda_communicator(threads, device);
    RankTensors tensors(config, num_ranks, rank, device, ids_RTK[rank]);
    Workspace workspace(config, *group);
    MoeLayer layer(config, *group, workspace);
    const OwnedStream stream;
    Event start, middle, end;
    CallContext call;
    const auto pass = [&] {
      check(cudaStreamSynchronize(stream.get()), "a timed pass");
      group->barrier("a timed pass", config.entry_deadline_s);
      start.record(stream.get());
      call = layer.forward(tensors.forward_input(), tensors.forward_output(), {stream.get()});
      middle.record(stream.get());
      layer.backward(call, tensors.backward_input(), tensors.backward_output(), {stream.get()});
      end.record(stream.get());
      layer.check({stream.get()});
    };
    for (int warm_up = 0; warm_up < kNumWarmups; ++warm_up) pass();
    float burst_passes = 0.0F;  // rank 0 decides
    if (rank == 0) {
      burst_passes = std::max(1.0F, static_cast<float>(std::floor(kBurstMs / end.ms_since(start))));
    }
    group->all_reduce_sum(&burst_passes, 1, "the length of a burst", config.entry_deadline_s);
    for (int repeat = 0; repeat < num_repeats; ++repeat) {
      if (repeat % static_cast<int>(burst_passes) == 0) {
        std::this_thread::sleep_for(kPause);
        pass();
      }
      pass();
      forward_RS[rank][repeat] = middle.ms_since(start);
      backward_RS[rank][repeat] = end.ms_since(middle);
    }
    auto& memory = static_cast<cuda::CudaWorkspace&>(*workspace.impl().memory);
    cuda::StageClock& clock = memory.stages;
    clock.switch_on();
    SamplesMs start_shares, exposed_shares;
    std::map<std::string, SamplesMs> forward_stages, backward_stages;
    for (int repeat = 0; repeat < kNumStagePasses; ++repeat) {
      if (repeat % 2 == 0) std::this_thread::sleep_for(kPause);
      check(cudaStreamSynchronize(stream.get()), "a timed pass");
      group->barrier("a timed pass", config.entry_deadline_s);
      const Waits before = waits_of(memory, stream.get());
      group->barrier("a timed pass", config.entry_deadline_s);
      call = layer.forward(tensors.forward_input(), tensors.forward_output(), {stream.get()});
      add_stages(clock, forward_stages);
      const Waits after = waits_of(memory, stream.get());
      const double products_ms = num_multiprocessors(device) *
                                 (forward_stages["gate_up"].back() + forward_stages["down"].back());
      start_shares.push_back((after.start_ms - before.start_ms) / products_ms);
      exposed_shares.push_back((after.later_ms - before.later_ms) / products_ms);
      group->barrier("a timed pass", config.entry_deadline_s);
      layer.backward(call, tensors.backward_input(), tensors.backward_output(), {stream.get()});
      add_stages(clock, backward_stages);
      layer.check({stream.get()});
    }
    if (rank == 0) {
      times.forward_stages_ms = medians(forward_stages);
      times.backward_stages_ms = medians(backward_stages);
      times.start_share = summarize(start_shares).median_ms;
      times.exposed_share = summarize(exposed_shares).median_ms;
    }
    group->barrier("the end of a benchmark", config.entry_deadline_s);
  });
  for (int repeat = 0; repeat < num_repeats; ++repeat) {
    double forward = 0.0;
    double backward = 0.0;
    for (int rank = 0; rank < num_ranks; ++rank) {
      forward = std::max(forward, forward_RS[rank][repeat]);
      backward = std::max(backward, backward_RS[rank][repeat]);
    }
    times.forward_ms.push_back(forward);
    times.backward_ms.push_back(backward);
  }
  return times;
}

double dense_tflops(int num_ranks) {
  constexpr std::int64_t kSize = 8192;
  constexpr int kNumRepeats = 27;  // about a burst
  constexpr int kNumIgnored = 2;
  double slowest = 0.0;
  for (int device = 0; device < std::min(num_ranks, num_cuda_devices()); ++device) {
    const CurrentDevice current(device);
    DeviceTensor a(device, kSize * kSize, 2), b(device, kSize * kSize, 2),
        c(device, kSize * kSize, 2);
    a.fill(1.0F, 1);
    b.fill(1.0F, 2);
    check(cudaDeviceSynchronize(), "random matrices");
    const OwnedStream stream;
    const DenseProduct product(stream.get());
    if (!product.is_available()) return 0.0;
    Event start, end;
    SamplesMs samples;
    std::this_thread::sleep_for(kPause);
    for (int repeat = 0; repeat < kNumRepeats; ++repeat) {
      start.record(stream.get());
      product.multiply(kSize, a.view<bf16>({kSize, kSize}).data, b.view<bf16>({kSize, kSize}).data,
                       c.view<bf16>({kSize, kSize}).data);
      end.record(stream.get());
      check(cudaStreamSynchronize(stream.get()), "a dense product");
      if (repeat >= kNumIgnored) samples.push_back(end.ms_since(start));
    }
    const double tflops = 2.0 * kSize * kSize * kSize / summarize(samples).median_ms * 1e-9;
    slowest = slowest == 0.0 ? tflops : std::min(slowest, tflops);
  }
  return slowest;
}

std::string cuda_device_name() {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return properties.name;
}

}  // namespace megamoe::bench
