// Times the products under which rows travel beside the chain that pulls, multiplies and pushes one
// after the other: on one GPU as the only rank, and as both ranks of a group of two with half of
// the SMs each. Peer memory is this GPU's own: NVLink is not in these numbers.
//
//   overlap_bench [--shapes qwen3-30b,qwen3-235b] [--stages gate_up,pulls] [--tokens 8192] [--json
//   out.json]
//
// --stages: only those whose names contain one of these.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <string>

#include "gpu/overlap_world.cuh"
#include "measure.cuh"
#include "shapes.h"

namespace megamoe::bench {
namespace {

using testing::check_cuda;
using testing::GpuRank;
using testing::LayerRank;
using testing::LayerRanks;
using testing::Overlap;

struct Record {
  std::string shape;
  int ranks;
  std::string stage;
  Timing timing;
  double share;  ///< of the dense rate; 0: not given
};

/// A group on this GPU: one rank with half of the experts, whose products are then as large as
/// those of a group of two, or both ranks with all of them.
class GroupBench {
 public:
  GroupBench(const Shape& shape, int num_ranks, int num_tokens, double dense,
             const std::string& stages, std::vector<Record>& records)
      : shape_(shape),
        dims_(dims_of(shape, num_ranks, num_tokens)),
        dense_(dense),
        stages_(stages),
        records_(records),
        layers_(dims_) {
    layers_.options.expected_group_rows = 2 * num_tokens * shape.num_slots / shape.num_experts;
    for (int r = 0; r < num_ranks; ++r) fill(layers_.layer(r).rank(), r, num_tokens);
    for (const Overlap overlap : {Overlap::off, Overlap::on}) {
      layers_.forward(overlap);
      layers_.backward(overlap);
    }
    layers_.forward(Overlap::off);
  }

  void run() {
    const auto pull = [](LayerRank& l) {
      gpu::pull_rows(l.rank().view, l.plan(), l.forward_rows(), l.rank().stream);
    };
    const auto order = [](LayerRank& l) {
      gpu::order_pulls(l.rank().view, l.plan(), l.forward_rows(), l.rank().stream);
    };
    const auto gate_up = [this](LayerRank& l) {
      multiply_gate_up(l.groups(), {}, l.x_CH(), l.experts().gate(), l.experts().up(), {}, {},
                       l.a_CI(), options_of(l));
    };
    const auto gate_up_and_pull = [this](LayerRank& l) {
      gpu::gate_up_and_pull(l.rank().view, l.plan(), {}, l.forward_rows(), l.tensors({}, {}),
                            options_of(l));
    };
    const auto down = [this](LayerRank& l) {
      multiply_down(l.groups(), l.a_CI(), l.experts().down(), l.results_CH(), options_of(l));
    };
    const auto push = [](LayerRank& l) {
      gpu::push_rows(l.rank().view, l.plan(), l.rank().results_CH.data(), l.rank().origin_C.data(),
                     {}, l.rank().stream);
    };
    const auto down_and_push = [this](LayerRank& l) {
      gpu::down_and_push(l.rank().view, l.plan(), l.rank().origin_C.data(), l.a_CI(),
                         l.experts().down(), options_of(l));
    };
    time("pull", 0, pull);
    time("order", 0, order);
    time("gate_up", 4, gate_up);
    time("order, gate_up_and_pull", 4, [&](LayerRank& l) {
      order(l);
      gate_up_and_pull(l);
    });
    // The parts of it: pulls alone, and the product when all rows are in place.
    const testing::DeviceBuffer<std::byte> no_rows(layers_.layer(0).rank().plan.size());
    check_cuda(cudaMemset(no_rows.data(), 0, no_rows.size()), "memset");
    time("order, pulls alone", 0, [&](LayerRank& l) {
      order(l);
      gpu::gate_up_and_pull(l.rank().view, no_rows.data(), {}, l.forward_rows(), l.tensors({}, {}),
                            options_of(l));
    });
    time("gate_up_and_pull, all here", 4, gate_up_and_pull);
    time("push", 0, push);
    time("down", 2, down);
    time("down_and_push", 2, down_and_push);
    time("forward, chain", 6,
         [this](LayerRank& l) { l.enqueue_forward(Overlap::off, layers_.options); });
    time("forward, overlapped", 6,
         [this](LayerRank& l) { l.enqueue_forward(Overlap::on, layers_.options); });
    // Without weight gradients: gate_up again, p, dx.
    time("backward, chain", 10,
         [this](LayerRank& l) { l.enqueue_backward(Overlap::off, layers_.options); });
    time("backward, overlapped", 10,
         [this](LayerRank& l) { l.enqueue_backward(Overlap::on, layers_.options); });
    // The same with g and u kept: p, dx.
    set_memory(testing::Memory::saved);
    time("backward saved, chain", 6,
         [this](LayerRank& l) { l.enqueue_backward(Overlap::off, layers_.options); });
    time("backward saved, overlapped", 6,
         [this](LayerRank& l) { l.enqueue_backward(Overlap::on, layers_.options); });
    time_gate_up_gradient(no_rows.data());
    set_memory(testing::Memory::recompute);
    time("dx", 4, [this](LayerRank& l) {
      multiply_dx(l.groups(), l.dg_CI(), l.du_CI(), l.experts().gate(), l.experts().up(),
                  l.results_CH(), options_of(l));
    });
    time("dx_and_push", 4, [this](LayerRank& l) {
      gpu::dx_and_push(l.rank().view, l.plan(), l.rank().origin_C.data(), l.dg_CI(), l.du_CI(),
                       l.experts().gate(), l.experts().up(), options_of(l));
    });
    if (layers_.failed()) std::printf("FAILED\n");
  }

 private:
  static WorkspaceDims dims_of(const Shape& shape, int num_ranks, int num_tokens) {
    WorkspaceDims dims;
    dims.routing = {num_ranks, shape.num_experts / 2 * num_ranks, shape.num_slots};
    dims.max_tokens = num_tokens;
    dims.hidden_dim = shape.hidden;
    dims.intermediate_dim = shape.intermediate;
    dims.row_capacity = std::int64_t{num_tokens} * shape.num_slots * 9 / 8;
    return dims;
  }

  /// With g and u kept: alone, with dy pulled under it, with x too, and the parts of that.
  void time_gate_up_gradient(std::byte* no_rows) {
    const auto order = [](LayerRank& l) {
      gpu::order_pulls(l.rank().view, l.plan(), l.backward_rows(), l.rank().stream);
    };
    const auto pulling = [this](LayerRank& l, const products::GroupedRows& groups,
                                gpu::LastPass x_pass) {
      gpu::gate_up_gradient_and_pull(l.rank().view, groups, {}, l.backward_rows(),
                                     l.experts().down(), l.kept_g_CI(), l.kept_u_CI(),
                                     l.gradients(), x_pass, options_of(l));
    };
    constexpr gpu::LastPass kDyAlone = gpu::LastPass::by_weight_gradients;
    time("p", 2, [this](LayerRank& l) {
      l.enqueue_gate_up_gradient(l.kept_g_CI(), l.kept_u_CI(), options_of(l));
    });
    time("order of dy and x", 0, order);
    time("order, p_and_pull dy", 2, [&](LayerRank& l) {
      order(l);
      pulling(l, l.groups(), kDyAlone);
    });
    time("order, p_and_pull dy and x", 2, [&](LayerRank& l) {
      order(l);
      pulling(l, l.groups(), gpu::LastPass::now);
    });
    time("p_and_pull, all here", 2, [&](LayerRank& l) { pulling(l, l.groups(), kDyAlone); });
    time("order, p's pulls of dy alone", 0, [&](LayerRank& l) {
      order(l);
      products::GroupedRows none = l.groups();
      none.begin = none.count = reinterpret_cast<const std::int32_t*>(no_rows);
      pulling(l, none, kDyAlone);
    });
  }

  [[nodiscard]] products::LaunchOptions options_of(LayerRank& layer) const {
    products::LaunchOptions options = layers_.options;
    options.stream = layer.rank().stream;
    return options;
  }

  void set_memory(testing::Memory memory) {
    layers_.set(memory, {});
    layers_.forward(Overlap::off);
  }

  /// Distinct experts for each token, uniformly at random.
  void fill(GpuRank& rank, int seed, int num_tokens) const {
    std::mt19937 random(77 + seed);
    const int num_experts = dims_.routing.num_experts;
    const int top_k = dims_.routing.top_k;
    std::vector<std::int32_t> ids(num_tokens * testing::id_stride(dims_), -1);
    for (int token = 0; token < num_tokens; ++token) {
      std::int32_t* ids_K = ids.data() + token * testing::id_stride(dims_);
      for (int slot = 0; slot < top_k; ++slot) {
        do {
          ids_K[slot] = static_cast<std::int32_t>(random() % static_cast<unsigned>(num_experts));
        } while (std::find(ids_K, ids_K + slot, ids_K[slot]) != ids_K + slot);
      }
    }
    rank.num_tokens = num_tokens;
    rank.ids.upload(ids);
    rank.weights.upload(std::vector<float>(rank.weights.size(), 0.125F));
    testing::fill_random(rank.x, 101 + seed, 1.0F);
    testing::fill_random(rank.dy, 201 + seed, 1.0F);
  }

  [[nodiscard]] bool is_wanted(const std::string& stage) const {
    if (stages_.empty()) return true;
    std::istringstream names(stages_);
    for (std::string name; std::getline(names, name, ',');) {
      if (stage.find(name) != std::string::npos) return true;
    }
    return false;
  }

  /// All ranks begin together; the time of the last one.
  void time(const std::string& stage, double flops_a_row,
            const std::function<void(LayerRank&)>& step) {
    if (!is_wanted(stage)) return;
    cudaStream_t first = layers_.layer(0).rank().stream;
    const auto launch = [&] {
      fork(first);
      for (int r = 0; r < layers_.num_ranks(); ++r) step(layers_.layer(r));
      join(first);
    };
    const Timing timing = time_burst_on(first, launch);
    const double rows =
        static_cast<double>(dims_.routing.num_ranks) * dims_.max_tokens * dims_.routing.top_k;
    const double tflops =
        flops_a_row * rows * shape_.hidden * shape_.intermediate / timing.median_ms / 1e9;
    const double share = tflops / dense_;
    records_.push_back({shape_.name, dims_.routing.num_ranks, stage, timing, share});
    std::printf("%-12s %d rank(s) %-26s %8.3f ms (%.3f..%.3f)", shape_.name.c_str(),
                dims_.routing.num_ranks, stage.c_str(), timing.median_ms, timing.min_ms,
                timing.max_ms);
    if (share > 0) std::printf("  %.3f P", share);
    std::printf("\n");
    std::fflush(stdout);
  }

  void fork(cudaStream_t first) {
    for (int r = 1; r < layers_.num_ranks(); ++r)
      order_streams(first, layers_.layer(r).rank().stream);
  }
  void join(cudaStream_t first) {
    for (int r = 1; r < layers_.num_ranks(); ++r)
      order_streams(layers_.layer(r).rank().stream, first);
  }
  static void order_streams(cudaStream_t before, cudaStream_t after) {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
    check_cuda(cudaEventRecord(event, before), "record");
    check_cuda(cudaStreamWaitEvent(after, event, 0), "wait");
    check_cuda(cudaEventDestroy(event), "destroy");
  }

  /// As time_burst of measure.cuh.
  static Timing time_burst_on(cudaStream_t stream, const std::function<void()>& launch) {
    const auto repeat = [&](int num_warmups, int num_repetitions) {
      std::vector<cudaEvent_t> events(num_repetitions + 1);
      for (cudaEvent_t& event : events) check_cuda(cudaEventCreate(&event), "cudaEventCreate");
      for (int i = 0; i < num_warmups; ++i) launch();
      check_cuda(cudaEventRecord(events[0], stream), "cudaEventRecord");
      for (int i = 0; i < num_repetitions; ++i) {
        launch();
        check_cuda(cudaEventRecord(events[i + 1], stream), "cudaEventRecord");
      }
      check_cuda(cudaDeviceSynchronize(), "timed launches");
      std::vector<float> ms(num_repetitions);
      for (int i = 0; i < num_repetitions; ++i) {
        cudaEventElapsedTime(&ms[i], events[i], events[i + 1]);
      }
      for (cudaEvent_t event : events) cudaEventDestroy(event);
      std::sort(ms.begin(), ms.end());
      return Timing{ms[ms.size() / 2], ms.front(), ms.back()};
    };
    const double once_ms = repeat(1, 1).median_ms;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return repeat(2, std::clamp(static_cast<int>(40.0 / once_ms), 5, 25));
  }

  Shape shape_;
  WorkspaceDims dims_;
  double dense_;
  std::string stages_;
  std::vector<Record>& records_;
  LayerRanks layers_;
};

void write_json(const std::string& path, const std::vector<Record>& records, double dense) {
  std::ofstream file(path);
  file << "[\n";
  for (std::size_t i = 0; i < records.size(); ++i) {
    const Record& r = records[i];
    file << "{\"shape\": \"" << r.shape << "\", \"ranks\": " << r.ranks << ", \"stage\": \""
         << r.stage << "\", \"ms\": " << r.timing.median_ms << ", \"min_ms\": " << r.timing.min_ms
         << ", \"max_ms\": " << r.timing.max_ms << ", \"share_of_dense\": " << r.share
         << ", \"dense_tflops\": " << dense << "}" << (i + 1 < records.size() ? ",\n" : "\n");
  }
  file << "]\n";
}

int run(int argc, char** argv) {
  std::string shape_names = "qwen3-30b,qwen3-235b,deepseek-v3";
  std::string stages;
  std::string json;
  int num_tokens = 8192;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--shapes") shape_names = argv[i + 1];
    if (name == "--stages") stages = argv[i + 1];
    if (name == "--tokens") num_tokens = std::stoi(argv[i + 1]);
    if (name == "--json") json = argv[i + 1];
  }
  const double dense = dense_tflops();
  std::printf("dense 8192^3: %.1f TFLOP/s\n", dense);
  std::vector<Record> records;
  for (const Shape& shape : shapes()) {
    if (("," + shape_names + ",").find("," + shape.name + ",") == std::string::npos) continue;
    for (const int num_ranks : {1, 2}) {
      GroupBench(shape, num_ranks, num_tokens, dense, stages, records).run();
    }
  }
  if (!json.empty()) write_json(json, records, dense);
  return 0;
}

}  // namespace
}  // namespace megamoe::bench

int main(int argc, char** argv) {
  try {
    return megamoe::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "overlap_bench: %s\n", error.what());
    return 1;
  }
}
