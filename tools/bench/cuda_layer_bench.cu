#include <algorithm>
#include <functional>
#include <mutex>
#include <thread>

#include "bench/cuda_bursts.h"
#include "bench/cuda_layer_bench.h"
#include "bench/cuda_rank_tensors.h"
#include "bench/dense_product.h"
#include "bench/routing.h"
#include "bench/sm_clock.h"
#include "comm/gpu_workspace_layout.h"
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
constexpr double kDeadlineS = 60.0;

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

/// The stages of the products, by device::ProductKind.
constexpr const char* kProductStages[device::kNumProductKinds] = {"gate_up", "down", "p", "dx",
                                                                  "weight_gradients"};

/// The tails of a pass over the time of the products that have them.
double tail_share(const device::CallControl& measures, const SamplesOfStages& stages) {
  double tails_ms = 0.0;
  double products_ms = 0.0;
  std::uint64_t num_ctas = 0;  // of a product that runs once: the least
  for (const device::ProductEnds& ends : measures.product_ends) {
    if (ends.num_ctas > 0)
      num_ctas = num_ctas == 0 ? ends.num_ctas : std::min(num_ctas, ends.num_ctas);
  }
  for (int product = 0; product < device::kNumProductKinds; ++product) {
    const device::ProductEnds& ends = measures.product_ends[product];
    const auto stage = stages.find(kProductStages[product]);
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

/// Of the last pass.
double products_ms(const SamplesOfStages& stages) {
  double sum = 0.0;
  const auto add = [&](const char* product) {
    if (const auto stage = stages.find(product); stage != stages.end()) sum += stage->second.back();
  };
  for (const char* product : kProductStages) add(product);
  add("gate_up_again");
  return sum;
}

/// How long loaders have waited for rows between two looks, of `all_sms_ms`.
void note_awaited_rows(const std::string& pass, const device::CallControl& before,
                       const device::CallControl& after, double all_sms_ms,
                       std::map<std::string, SamplesMs>& shares) {
  shares[pass + " start"].push_back(ms_between(before.start_wait_ns, after.start_wait_ns) /
                                    all_sms_ms);
  shares[pass + " later"].push_back(ms_between(before.later_wait_ns, after.later_wait_ns) /
                                    all_sms_ms);
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
    const device::CallControl between = take_measures(memory, on.stream);
    note_awaited_rows("forward", before, between, num_sms * products_ms(forward_stages), shares);
    shares["forward tail"].push_back(tail_share(between, forward_stages));
    group.barrier("a timed pass", config.entry_deadline_s);
    layer.backward(call, tensors.backward_input(), tensors.backward_output(), {on.stream});
    add_stages(clock, backward_stages);
    layer.check({on.stream});
    const device::CallControl after = take_measures(memory, on.stream);
    note_awaited_rows("backward", between, after, num_sms * products_ms(backward_stages), shares);
    shares["backward tail"].push_back(tail_share(after, backward_stages));
    if (config.overlap == Overlap::off || group.topology().num_hosts() > 1) continue;
    shares["peers"].push_back(peers_awaited_share(backward_stages));
    shares["summed"].push_back(summed_beside_share(config, group.size(), memory));
  }
  std::map<std::string, double> medians_of = medians(shares);  // 0 for what was not measured
  CudaLayerTimes times;
  times.forward_stages_ms = medians(forward_stages);
  times.backward_stages_ms = medians(backward_stages);
  times.forward_rows = {medians_of["forward start"], medians_of["forward later"]};
  times.backward_rows = {medians_of["backward start"], medians_of["backward later"]};
  times.forward_tail_share = medians_of["forward tail"];
  times.backward_tail_share = medians_of["backward tail"];
  times.peers_awaited_share = medians_of["peers"];
  times.summed_beside_share = medians_of["summed"];
  return times;
}

/// Of each pass, the slowest rank's.
SamplesMs slowest_of(Communicator& group, const SamplesMs& mine_S, double deadline_s) {
  SamplesMs all_RS(group.size() * mine_S.size());
  group.all_gather(mine_S.data(), all_RS.data(), mine_S.size() * sizeof(mine_S[0]),
                   "the times of all ranks", deadline_s);
  SamplesMs slowest_S = mine_S;
  for (std::size_t i = 0; i < all_RS.size(); ++i) {
    double& slowest = slowest_S[i % mine_S.size()];
    slowest = std::max(slowest, all_RS[i]);
  }
  return slowest_S;
}

/// 0 where cuBLAS is missing.
DenseRate dense_rate_of(int device) {
  constexpr std::int64_t kSize = 8192;
  constexpr int kNumRepeats = 27;  // about a burst
  constexpr int kNumIgnored = 2;
  const CurrentDevice current(device);
  DeviceTensor a(device, kSize * kSize, 2), b(device, kSize * kSize, 2),
      c(device, kSize * kSize, 2);
  a.fill(1.0F, 1);
  b.fill(1.0F, 2);
  check(cudaDeviceSynchronize(), "random matrices");
  const OwnedStream stream;
  const DenseProduct product(stream.get());
  if (!product.is_available()) return {};
  Event start, end;
  SamplesMs samples;
  SmClock clock(device);
  std::this_thread::sleep_for(kBurstPause);
  for (int repeat = 0; repeat < kNumRepeats; ++repeat) {
    if (repeat == kNumIgnored) clock.start(stream.get());
    start.record(stream.get());
    product.multiply(kSize, a.view<bf16>({kSize, kSize}).data, b.view<bf16>({kSize, kSize}).data,
                     c.view<bf16>({kSize, kSize}).data);
    end.record(stream.get());
    check(cudaStreamSynchronize(stream.get()), "a dense product");
    if (repeat >= kNumIgnored) samples.push_back(end.ms_since(start));
  }
  clock.end(stream.get());
  return {2.0 * kSize * kSize * kSize / summarize(samples).median_ms * 1e-9,
          clock.ghz(stream.get())};
}

}  // namespace

CudaLayerTimes time_layer_on_cuda(const LayerConfig& config,
                                  const std::vector<std::vector<std::int32_t>>& ids_RTK,
                                  int num_repeats, Communicator* launched,
                                  const CudaHostsOptions& hosts) {
  const int num_ranks = static_cast<int>(ids_RTK.size());
  const int busiest = count_busiest(config.shape, ids_RTK).rank;
  CudaLayerTimes times;  // whose shares are those of the one rank here that speaks
  const auto run_rank = [&](Communicator& ranks, int device, bool speaks) {
    const int rank = ranks.rank();
    const CurrentDevice current(device);
    const auto group = make_cuda_communicator(ranks, device, hosts);
    SamplesMs forward_S(num_repeats);
    SamplesMs backward_S(num_repeats);
    RankTensors tensors(config, num_ranks, rank, device, ids_RTK[rank]);
    Workspace workspace(config, *group);
    MoeLayer layer(config, *group, workspace);
    const OwnedStream stream;
    Event start, middle, end;
    SmClock clock(device);
    std::vector<double> clock_S(num_repeats);
    CallContext call;
    const auto pass = [&] {
      clock.start(stream.get());
      check(cudaStreamSynchronize(stream.get()), "a timed pass");
      group->barrier("a timed pass", config.entry_deadline_s);
      start.record(stream.get());
      call = layer.forward(tensors.forward_input(), tensors.forward_output(), {stream.get()});
      middle.record(stream.get());
      layer.backward(call, tensors.backward_input(), tensors.backward_output(), {stream.get()});
      end.record(stream.get());
      clock.end(stream.get());
      layer.check({stream.get()});
    };
    run_in_bursts(
        *group, config.entry_deadline_s, {kNumWarmups, num_repeats}, pass,
        [&] { return end.ms_since(start); },
        [&](int repeat) {
          forward_S[repeat] = middle.ms_since(start);
          backward_S[repeat] = end.ms_since(middle);
          clock_S[repeat] = clock.ghz(stream.get());
        });
    CudaLayerTimes looks =
        look_into_passes(config, *group, workspace, layer, tensors, {device, stream.get()});
    looks.forward_ms = slowest_of(*group, forward_S, config.entry_deadline_s);
    looks.backward_ms = slowest_of(*group, backward_S, config.entry_deadline_s);
    const double clock_ghz = summarize(clock_S).median_ms;
    looks.clock_ghz_R.resize(num_ranks);
    group->all_gather(&clock_ghz, looks.clock_ghz_R.data(), sizeof clock_ghz,
                      "the clocks of all ranks", config.entry_deadline_s);
    if (speaks) times = looks;
    group->barrier("the end of a benchmark", config.entry_deadline_s);
  };
  if (launched != nullptr) {
    run_rank(*launched, verify::cuda_device_of(launched->topology(), launched->rank()), true);
  } else {
    run_ranks(num_ranks, [&](Communicator& threads) {
      run_rank(threads, verify::cuda_device_of(threads.rank(), num_ranks),
               threads.rank() == busiest);
    });
  }
  return times;
}

DenseRate dense_rate(int num_ranks, Communicator* launched) {
  std::vector<DenseRate> of_devices;
  if (launched != nullptr) {
    const DenseRate mine =
        dense_rate_of(verify::cuda_device_of(launched->topology(), launched->rank()));
    of_devices.resize(launched->size());
    launched->all_gather(&mine, of_devices.data(), sizeof mine, "a dense product", kDeadlineS);
  } else {
    for (int device = 0; device < std::min(num_ranks, num_cuda_devices()); ++device)
      of_devices.push_back(dense_rate_of(device));
  }
  return *std::ranges::min_element(of_devices, {}, &DenseRate::tflops);
}

std::string cuda_device_name() {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return properties.name;
}

}  // namespace megamoe::bench
