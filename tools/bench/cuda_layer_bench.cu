#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <mutex>
#include <thread>

#include "bench/cuda_bursts.h"
#include "bench/cuda_layer_bench.h"
#include "bench/cuda_rank_tensors.h"
#include "bench/dense_product.h"
#include "comm/gpu_workspace_layout.h"
#include "cuda/workspace.h"
#include "layer/workspace.h"
#include "megamoe/cuda.h"
#include "megamoe/megamoe.h"
#include "schedule/variant.h"
#include "verify/device_copies.h"

namespace megamoe::bench {
namespace {

using cuda::check;
using cuda::CurrentDevice;
using cuda::DeviceMemory;
using cuda::OwnedStream;

constexpr int kNumWarmups = 4;
constexpr int kNumStagePasses = 5;

using SamplesOfStages = std::map<std::string, SamplesMs>;

std::map<std::string, double> medians(SamplesOfStages samples) {
  std::map<std::string, double> result;
  for (const auto& [name, values] : samples) result[name] = summarize(values).median_ms;
  return result;
}

/// What the kernels have measured so far; what is not a sum over all calls starts anew.
device::CallControl take_measures(const cuda::CudaWorkspace& workspace, cudaStream_t stream) {
  device::CallControl control{};
  check(cudaMemcpyAsync(&control, workspace.local.data(), sizeof(control), cudaMemcpyDeviceToHost,
                        stream),
        "the waits of a pass");
  check(cudaMemsetAsync(workspace.local.data() + offsetof(device::CallControl, product_ends), 0,
                        sizeof(control.product_ends), stream),
        "the waits of a pass");
  check(cudaStreamSynchronize(stream), "the waits of a pass");
  return control;
}

double ms_between(std::uint64_t before_ns, std::uint64_t after_ns) {
  return static_cast<double>(after_ns - before_ns) * 1e-6;
}

/// The tails of a pass over the time of the products that have them.
double tail_share(const device::CallControl& measures, const SamplesOfStages& stages) {
  constexpr const char* kStages[device::kNumProductKinds] = {"gate_up", "down", "p", "dx",
                                                             "weight_gradients"};
  double tails_ms = 0.0;
  double products_ms = 0.0;
  std::uint64_t num_ctas = 0;  // of a product that runs once: the least
  for (const device::ProductEnds& ends : measures.product_ends) {
    if (ends.num_ctas > 0)
      num_ctas = num_ctas == 0 ? ends.num_ctas : std::min(num_ctas, ends.num_ctas);
  }
  for (int product = 0; product < device::kNumProductKinds; ++product) {
    const device::ProductEnds& ends = measures.product_ends[product];
    const auto stage = stages.find(kStages[product]);
    if (ends.num_ctas == 0 || ends.num_ctas != num_ctas || stage == stages.end()) continue;
    tails_ms +=
        ms_between(ends.sum_ns, ends.num_ctas * ends.last_ns) / static_cast<double>(ends.num_ctas);
    products_ms += stage->second.back();
  }
  return products_ms == 0.0 ? 0.0 : tails_ms / products_ms;
}

int num_multiprocessors(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  return count;
}

void add_stages(cuda::StageClock& clock, SamplesOfStages& samples) {
  std::map<std::string, double> sums;
  for (const cuda::StageClock::Stage& stage : clock.take()) sums[stage.name] += stage.ms;
  for (const auto& [name, ms] : sums) samples[name].push_back(ms);
}

/// Tokens whose dx was summed beside the weight gradients of the last backward pass, over all.
double summed_beside_share(const LayerConfig& config, int num_ranks,
                           const cuda::CudaWorkspace& workspace) {
  const GpuLocalLayout layout = gpu_local_layout(workspace_dims(config, num_ranks));
  std::uint32_t num_taken = 0;  // warps go on taking until there is nothing
  check(cudaMemcpy(&num_taken, workspace.local.data() + layout.scratch.num_reduced.offset,
                   sizeof num_taken, cudaMemcpyDeviceToHost),
        "the tokens that were summed");
  return std::min(1.0, num_taken / static_cast<double>(config.shape.max_tokens));
}

/// This rank's part of the time from dx on in which only peers were not done.
double peers_awaited_share(const SamplesOfStages& stages) {
  const auto last = [&](const char* stage) { return stages.at(stage).back(); };
  const double awaited_ms = last("meet_results");
  return awaited_ms /
         (last("dx") + last("push") + last("weight_gradients") + awaited_ms + last("reduce"));
}

struct RankDevice {
  int device;
  cudaStream_t stream;
};

__global__ void hash_kernel(const std::uint32_t* words, std::int64_t count, unsigned long long* sum) {
  unsigned long long own = 0;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    unsigned long long v = words[i] + 0x9e3779b97f4a7c15ULL * static_cast<unsigned long long>(i + 1);
    v = (v ^ (v >> 31)) * 0x7fb5d329728ea185ULL;
    own += v ^ (v >> 29);
  }
  atomicAdd(sum, own);
}

/// Stages and shares of passes of their own; by all ranks. Times of whole passes stay empty.
CudaLayerTimes look_into_passes(const LayerConfig& config, Communicator& group,
                                Workspace& workspace, MoeLayer& layer, RankTensors& tensors,
                                const RankDevice& on) {
  auto& memory = static_cast<cuda::CudaWorkspace&>(*workspace.impl().memory);
  const double num_sms = num_multiprocessors(on.device);
  cuda::StageClock& clock = memory.stages;
  clock.switch_on();
  std::map<std::string, SamplesMs> shares;
  SamplesOfStages forward_stages, backward_stages;
  for (int repeat = 0; repeat < kNumStagePasses; ++repeat) {
    if (repeat % 2 == 0) std::this_thread::sleep_for(kBurstPause);
    check(cudaStreamSynchronize(on.stream), "a timed pass");
    group.barrier("a timed pass", config.entry_deadline_s);
    const device::CallControl before = take_measures(memory, on.stream);
    group.barrier("a timed pass", config.entry_deadline_s);
    const CallContext call =
        layer.forward(tensors.forward_input(), tensors.forward_output(), {on.stream});
    add_stages(clock, forward_stages);
    const device::CallControl after = take_measures(memory, on.stream);
    const double products_ms =
        num_sms * (forward_stages["gate_up"].back() + forward_stages["down"].back());
    shares["start"].push_back(ms_between(before.start_wait_ns, after.start_wait_ns) / products_ms);
    shares["later"].push_back(ms_between(before.later_wait_ns, after.later_wait_ns) / products_ms);
    shares["forward tail"].push_back(tail_share(after, forward_stages));
    group.barrier("a timed pass", config.entry_deadline_s);
    layer.backward(call, tensors.backward_input(), tensors.backward_output(), {on.stream});
    add_stages(clock, backward_stages);
    layer.check({on.stream});
    shares["backward tail"].push_back(
        tail_share(take_measures(memory, on.stream), backward_stages));
    if (config.overlap == Overlap::off) continue;
    shares["peers"].push_back(peers_awaited_share(backward_stages));
    shares["summed"].push_back(summed_beside_share(config, group.size(), memory));
  }
  std::map<std::string, double> medians_of = medians(shares);  // 0 for what was not measured
  CudaLayerTimes times;
  times.forward_stages_ms = medians(forward_stages);
  times.backward_stages_ms = medians(backward_stages);
  times.start_share = medians_of["start"];
  times.exposed_share = medians_of["later"];
  times.forward_tail_share = medians_of["forward tail"];
  times.backward_tail_share = medians_of["backward tail"];
  times.peers_awaited_share = medians_of["peers"];
  times.summed_beside_share = medians_of["summed"];
  return times;
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
    if (const char* file = std::getenv("FP_VARIANTS"); file != nullptr) {
      std::vector<std::pair<std::string, std::string>> variants;
      std::ifstream lines(file);
      for (std::string line; std::getline(lines, line);) {
        const auto space = line.find(' ');
        if (space != std::string::npos) variants.emplace_back(line.substr(0, space), line.substr(space));
      }
      const DeviceMemory sum(device, 8, "a hash");
      const int num_rounds = std::getenv("FP_ROUNDS") ? std::atoi(std::getenv("FP_ROUNDS")) : 2;
      const std::int64_t words = tensors.e * tensors.I * tensors.H * (tensors.stores_bf16 ? 2 : 4) / 4;
      std::map<std::string, std::vector<float>> samples;
      for (int warm_up = 0; warm_up < kNumWarmups; ++warm_up) pass();
      for (int round = 0; round < num_rounds; ++round) {
        for (const auto& [name, numbers] : variants) {
          variant() = parse_variant(numbers.c_str());
          unsigned long long hash = 0;
          if (round == 0) {
            check(cudaMemset(sum.data(), 0, 8), "hash");
            const auto out = tensors.backward_output();
            for (const TensorView& g : {out.experts.gate, out.experts.up, out.experts.down})
              check(cudaMemset(g.data, 0x3c, words * 4), "fill");
            check(cudaMemset(out.dx.data, 0xff, tensors.T * tensors.H * 2), "fill");
            pass();
            auto* s = reinterpret_cast<unsigned long long*>(sum.data());
            for (const TensorView& g : {out.experts.gate, out.experts.up, out.experts.down})
              hash_kernel<<<2048, 256>>>(static_cast<const std::uint32_t*>(g.data), words, s);
            hash_kernel<<<2048, 256>>>(static_cast<const std::uint32_t*>(out.dx.data),
                                       tensors.T * tensors.H / 2, s);
            check(cudaMemcpy(&hash, s, 8, cudaMemcpyDeviceToHost), "hash");
          }
          SamplesMs forward, backward;
          run_in_bursts(
              *group, config.entry_deadline_s, {1, num_repeats}, pass,
              [&] { return end.ms_since(start); },
              [&](int) {
                forward.push_back(middle.ms_since(start));
                float ms = static_cast<float>(end.ms_since(middle));
                backward.push_back(ms);
              });
          std::string stages;
          if (round == 1 && std::getenv("FP_STAGES") != nullptr) {
            const CudaLayerTimes looks =
                look_into_passes(config, *group, workspace, layer, tensors, {device, stream.get()});
            char text[160];
            const auto& ms = looks.backward_stages_ms;
            const auto of = [&](const char* stage) {
              const auto at = ms.find(stage);
              return at == ms.end() ? 0.0 : at->second;
            };
            std::snprintf(text, sizeof text, " p %.3f dx %.3f dw %.3f meet %.3f red %.3f summed %.2f", of("p"),
                          of("dx"), of("weight_gradients"), of("meet_results"), of("reduce"),
                          looks.summed_beside_share);
            stages = text;
          }
          std::sort(backward.begin(), backward.end());
          std::printf("V %-10s r%d g%d H%lld b %.3f [%.3f %.3f] f %.3f%s hash %016llx\n", name.c_str(), round,
                      rank, static_cast<long long>(tensors.H), backward[backward.size() / 2], backward.front(),
                      backward.back(), summarize(forward).median_ms, stages.c_str(), hash);
          std::fflush(stdout);
        }
      }
      variant() = Variant{};
    }
    run_in_bursts(
        *group, config.entry_deadline_s, {kNumWarmups, num_repeats}, pass,
        [&] { return end.ms_since(start); },
        [&](int repeat) {
          forward_RS[rank][repeat] = middle.ms_since(start);
          backward_RS[rank][repeat] = end.ms_since(middle);
        });
    const CudaLayerTimes looks =
        look_into_passes(config, *group, workspace, layer, tensors, {device, stream.get()});
    if (rank == 0) times = looks;
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
    std::this_thread::sleep_for(kBurstPause);
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
