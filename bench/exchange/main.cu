// Times the stages of a layer's exchange on one GPU that holds both ranks of a group of two, beside
// the copy bandwidth of the same run. Peer memory is this GPU's own: NVLink is not in these
// numbers.
//
//   exchange_bench [--tokens 8192] [--repetitions 30] [--json out.json]
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>

#include "gpu/gpu_ranks.cuh"
#include "kernels/router/router.h"

namespace megamoe::bench {
namespace {

using device::Signal;
using testing::check_cuda;
using testing::DeviceBuffer;
using testing::GpuRank;
using testing::GpuRanks;

struct Shape {
  const char* name;
  std::int64_t hidden;
  std::int64_t intermediate;
  int num_experts;
  int top_k;
};
constexpr Shape kShapes[] = {{"qwen3-30b", 2048, 768, 128, 8},
                             {"qwen3-235b", 4096, 1536, 128, 8},
                             {"deepseek-v3", 7168, 2048, 256, 8}};

struct Timing {
  double median_us = 0.0;
  double min_us = 0.0;
  double max_us = 0.0;
};

/// `launch` enqueues one repetition on `stream`.
Timing time_launches(cudaStream_t stream, int repetitions, const std::function<void()>& launch) {
  std::vector<cudaEvent_t> events(repetitions + 1);
  for (cudaEvent_t& event : events) check_cuda(cudaEventCreate(&event), "cudaEventCreate");
  for (int i = 0; i < 3; ++i) launch();
  check_cuda(cudaEventRecord(events[0], stream), "cudaEventRecord");
  for (int i = 0; i < repetitions; ++i) {
    launch();
    check_cuda(cudaEventRecord(events[i + 1], stream), "cudaEventRecord");
  }
  check_cuda(cudaDeviceSynchronize(), "timed launches");
  std::vector<float> us(repetitions);
  for (int i = 0; i < repetitions; ++i) {
    cudaEventElapsedTime(&us[i], events[i], events[i + 1]);
    us[i] *= 1000.0F;
  }
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us.front(), us.back()};
}

/// A graph of `kStepsAGraph` repetitions on one stream: small kernels that the host launches one by
/// one wait for the host.
class StepGraph {
 public:
  static constexpr int kStepsAGraph = 20;

  StepGraph(cudaStream_t stream, const std::function<void()>& launch) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kStepsAGraph; ++i) launch();
    check_cuda(cudaStreamEndCapture(stream, &graph), "end of capture");
    check_cuda(cudaGraphInstantiate(&exec_, graph, 0), "instantiate");
    check_cuda(cudaGraphUpload(exec_, stream), "upload of a graph");
    check_cuda(cudaGraphDestroy(graph), "destroy");
    check_cuda(cudaStreamSynchronize(stream), "upload of a graph");
  }
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;
  ~StepGraph() { cudaGraphExecDestroy(exec_); }
  void launch() const { check_cuda(cudaGraphLaunch(exec_, stream_), "graph launch"); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
};

/// GB/s, bytes read and bytes written.
double copy_bandwidth(int repetitions) {
  constexpr std::int64_t kBytes = std::int64_t{1} << 30;
  const DeviceBuffer<std::byte> from(kBytes);
  const DeviceBuffer<std::byte> to(kBytes);
  const Timing timing = time_launches(nullptr, repetitions, [&] {
    cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, nullptr);
  });
  return 2.0 * kBytes / timing.median_us / 1e3;
}

struct Record {
  std::string shape;
  std::string stage;
  Timing timing;
  double gb_per_s;  ///< 0: not a stage that moves rows
  double share;     ///< of the copy bandwidth
};

class ShapeBench {
 public:
  ShapeBench(const Shape& shape, std::int64_t num_tokens, int repetitions, double copy_gb_per_s,
             std::vector<Record>& records)
      : shape_(shape),
        dims_(dims_of(shape, num_tokens)),
        repetitions_(repetitions),
        copy_gb_per_s_(copy_gb_per_s),
        records_(records),
        ranks_(dims_),
        logits_TE_(num_tokens * shape.num_experts),
        route_weights_(num_tokens * shape.top_k),
        route_ids_(num_tokens * shape.top_k),
        refused_(1) {
    router_.num_experts = shape.num_experts;
    router_.top_k = shape.top_k;
    router_.weight_norm = WeightNorm::sum_to_one;
    testing::CaseMaker cases(dims_, 3);
    logits_TE_.upload(cases.floats(logits_TE_.size()));
    for (int r = 0; r < 2; ++r) {
      GpuRank& rank = ranks_.rank(r);
      testing::RankInput input = cases.rank_input(num_tokens, testing::Pattern::uniform);
      make_distinct(input);
      rank.upload(input);
      rank.upload({cases.rows(64, shape.hidden), {}});
      testing::fill_random(rank.results_CH, 5 + r, 1.0F);
      check_cuda(cudaMemset(rank.dweight_segments.data(), 0, rank.dweight_segments.size() * 4),
                 "0");
    }
    ranks_.forward(testing::Pull::through_registers);
    ranks_.backward(testing::Pull::through_registers);
    ranks_.forward(testing::Pull::in_bulk);
    count_traffic();
  }

  void run() {
    GpuRank& rank = ranks_.rank(0);
    std::byte* plan = rank.plan.data();
    const std::int64_t tokens = rank.num_tokens;
    cudaStream_t stream = rank.stream;
    const double row = 2.0 * dims_.hidden_dim;
    const auto count = [](GpuRank& r) {
      gpu::count_slots(r.view, r.plan.data(), r.routing_input(), r.num_tokens, r.stream);
    };
    const auto enter = [](GpuRank& r) {
      gpu::enter_call(r.view, r.plan.data(), gpu::CallKind::forward, testing::kForwardCall,
                      r.num_tokens, r.stream);
    };
    const auto lists = [](GpuRank& r) {
      gpu::write_pull_lists(r.view, r.plan.data(), r.num_tokens, r.stream);
    };
    time_small("route", 1, [&](GpuRank& r) { route(r.stream); });
    time_small("count_slots", 1, count);
    time_small("count_slots, enter_call (2 ranks)", 2, [&](GpuRank& r) {
      count(r);
      enter(r);
    });
    time_small("the whole plan (2 ranks)", 2, [&](GpuRank& r) {
      count(r);
      enter(r);
      lists(r);
    });
    time_small("write_pull_lists", 1, lists);
    time_small("meet (2 ranks)", 2,
               [](GpuRank& r) { gpu::meet(r.view, r.plan.data(), Signal::rows_staged, r.stream); });
    time("stage x", 2 * row * tokens,
         [&] { gpu::stage_forward(rank.view, rank.x_input(), tokens, stream); });
    time("stage x, dy", 4 * row * tokens, [&] {
      gpu::stage_backward(rank.view, plan, rank.x_input(), rank.dy_input(), tokens, stream);
    });
    const gpu::PulledRows forward{rank.x_CH.data(), nullptr, nullptr, rank.origin_C.data()};
    const gpu::PulledRows backward{rank.x_CH.data(), rank.dy_CH.data(), rank.weight_C.data(),
                                   rank.origin_C.data()};
    const double pulled = row * (num_pulls_ + num_padded_rows_);
    time("pull x", pulled, [&] { gpu::pull_rows(rank.view, plan, forward, stream); });
    time("pull x in bulk", pulled,
         [&] { gpu::pull_rows_in_bulk(rank.view, plan, forward, stream); });
    time("pull x, dy", 2 * pulled, [&] { gpu::pull_rows(rank.view, plan, backward, stream); });
    time("pull x, dy in bulk", 2 * pulled,
         [&] { gpu::pull_rows_in_bulk(rank.view, plan, backward, stream); });
    time("push o", 2 * row * num_rows_, [&] {
      gpu::push_rows(rank.view, plan, rank.results_CH.data(), rank.origin_C.data(), {}, stream);
    });
    time("push dx, dw", 2 * row * num_rows_ + 4.0 * num_rows_ * rank.segments().num_segments, [&] {
      gpu::push_rows(rank.view, plan, rank.results_CH.data(), rank.origin_C.data(), rank.segments(),
                     stream);
    });
    const double reduced = row * tokens * (dims_.routing.top_k + 1);
    time("reduce y", reduced,
         [&] { gpu::reduce_outputs(rank.view, plan, rank.output(), tokens, stream); });
    time("reduce dx, dw", reduced, [&] {
      gpu::reduce_gradients(rank.view, plan, rank.output(),
                            {rank.dweights.data(), testing::id_stride(dims_)}, tokens, stream);
    });
    for (int r = 0; r < 2; ++r) {
      if (ranks_.rank(r).view.failure->is_set != 0) std::printf("FAILED: rank %d\n", r);
    }
  }

 private:
  static WorkspaceDims dims_of(const Shape& shape, std::int64_t num_tokens) {
    WorkspaceDims dims;
    dims.routing = {2, shape.num_experts, shape.top_k};
    dims.max_tokens = num_tokens;
    dims.hidden_dim = shape.hidden;
    dims.intermediate_dim = shape.intermediate;
    dims.row_capacity = num_tokens * shape.top_k * 5 / 4;
    return dims;
  }

  /// A router names an expert once a token.
  void make_distinct(testing::RankInput& input) const {
    const int top_k = dims_.routing.top_k;
    for (std::int64_t token = 0; token < input.num_tokens; ++token) {
      std::int32_t* ids_K = input.ids.data() + token * testing::id_stride(dims_);
      for (int slot = 1; slot < top_k; ++slot) {
        while (std::find(ids_K, ids_K + slot, ids_K[slot]) != ids_K + slot) {
          ids_K[slot] = (ids_K[slot] + 37) % dims_.routing.num_experts;
        }
      }
    }
  }

  void route(cudaStream_t stream) {
    gpu::RouterReads reads;
    reads.num_tokens = route_ids_.size() / dims_.routing.top_k;
    reads.num_slots = dims_.routing.top_k;
    reads.logits_TE = logits_TE_.data();
    reads.logit_stride = dims_.routing.num_experts;
    gpu::route(router_, reads, {route_ids_.data(), dims_.routing.top_k},
               {route_weights_.data(), dims_.routing.top_k}, {refused_.data(), nullptr}, stream);
  }

  void count_traffic() {
    const GpuRank& rank = ranks_.rank(0);
    for (const std::int32_t count : rank.download(rank.view.plan_layout.group_count_e)) {
      num_rows_ += count;
    }
    num_padded_rows_ = rank.download(rank.view.plan_layout.expert_begin).back();
    for (int source = 0; source < 2; ++source) {
      std::int64_t begin[2];
      check_cuda(cudaMemcpy(begin, rank.view.pull_lists(source).destination_begin, sizeof(begin),
                            cudaMemcpyDeviceToHost),
                 "destination_begin");
      num_pulls_ += begin[1] - begin[0];
    }
    std::printf("%s: H %lld, %lld rows (%lld with pads), %lld pulls\n", shape_.name,
                static_cast<long long>(dims_.hidden_dim), static_cast<long long>(num_rows_),
                static_cast<long long>(num_padded_rows_), static_cast<long long>(num_pulls_));
  }

  void add(const std::string& stage, double bytes, const Timing& timing) {
    const double gb_per_s = bytes / timing.median_us / 1e3;
    records_.push_back({shape_.name, stage, timing, gb_per_s, gb_per_s / copy_gb_per_s_});
    std::printf("%-12s %-36s %8.1f us (%.1f..%.1f)", shape_.name, stage.c_str(), timing.median_us,
                timing.min_us, timing.max_us);
    if (bytes > 0) std::printf(" %7.0f GB/s %.2f of copy", gb_per_s, gb_per_s / copy_gb_per_s_);
    std::printf("\n");
  }
  void time(const std::string& stage, double bytes, const std::function<void()>& launch) {
    add(stage, bytes, time_launches(ranks_.rank(0).stream, repetitions_, launch));
  }
  /// A step of one rank alone, or of both ranks at once where they wait for each other.
  void time_small(const std::string& stage, int num_ranks,
                  const std::function<void(GpuRank&)>& step) {
    std::vector<std::unique_ptr<StepGraph>> graphs;
    for (int r = 0; r < num_ranks; ++r) {
      GpuRank& rank = ranks_.rank(r);
      graphs.push_back(std::make_unique<StepGraph>(rank.stream, [&] { step(rank); }));
    }
    Timing timing = time_launches(ranks_.rank(0).stream, repetitions_, [&] {
      for (const auto& graph : graphs) graph->launch();
    });
    timing.median_us /= StepGraph::kStepsAGraph;
    timing.min_us /= StepGraph::kStepsAGraph;
    timing.max_us /= StepGraph::kStepsAGraph;
    add(stage, 0, timing);
  }

  Shape shape_;
  WorkspaceDims dims_;
  int repetitions_;
  double copy_gb_per_s_;
  std::vector<Record>& records_;
  GpuRanks ranks_;
  RouterConfig router_;
  DeviceBuffer<float> logits_TE_;
  DeviceBuffer<float> route_weights_;
  DeviceBuffer<std::int32_t> route_ids_;
  DeviceBuffer<unsigned long long> refused_;
  std::int64_t num_rows_ = 0;
  std::int64_t num_padded_rows_ = 0;
  std::int64_t num_pulls_ = 0;
};

void write_json(const std::string& path, const std::vector<Record>& records) {
  std::ofstream file(path);
  file << "[\n";
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Record& r = records[i];
    file << "{\"shape\": \"" << r.shape << "\", \"stage\": \"" << r.stage
         << "\", \"us\": " << r.timing.median_us << ", \"min_us\": " << r.timing.min_us
         << ", \"max_us\": " << r.timing.max_us << ", \"gb_per_s\": " << r.gb_per_s
         << ", \"share_of_copy\": " << r.share << "}" << (i + 1 < records.size() ? ",\n" : "\n");
  }
  file << "]\n";
}

int run(int argc, char** argv) {
  std::int64_t num_tokens = 8192;
  int repetitions = 30;
  std::string json;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--tokens") num_tokens = std::stoll(argv[i + 1]);
    if (name == "--repetitions") repetitions = std::stoi(argv[i + 1]);
    if (name == "--json") json = argv[i + 1];
  }
  std::vector<Record> records;
  const double copy = copy_bandwidth(repetitions);
  std::printf("copy of 1 GiB: %.0f GB/s, bytes read and written\n", copy);
  for (const Shape& shape : kShapes) {
    ShapeBench(shape, num_tokens, repetitions, copy, records).run();
  }
  if (!json.empty()) write_json(json, records);
  return 0;
}

}  // namespace
}  // namespace megamoe::bench

int main(int argc, char** argv) {
  try {
    return megamoe::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "exchange_bench: %s\n", error.what());
    return 1;
  }
}
