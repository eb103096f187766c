// What the network between hosts costs a layer of the CUDA backend: how fast messages travel, and
// what forward and backward take, with and without overlap, beside what their products take by
// themselves (in calls without overlap) and their bytes at the bandwidth of large messages.
//
// Without --launched it starts two processes, stand-in hosts with a GPU each, which see each other
// by NCCL's sockets on the loopback interface alone.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "bench/cuda_bursts.h"
#include "bench/cuda_rank_tensors.h"
#include "bench/routing.h"
#include "bench/run_info.h"
#include "bench/samples.h"
#include "comm/cuda/nccl_library.h"
#include "comm/network/socket.h"
#include "common/launch.h"
#include "cuda/stream_order.h"
#include "cuda/workspace.h"
#include "layer/workspace.h"
#include "megamoe/cuda.h"
#include "megamoe/megamoe.h"
#include "megamoe/network.h"
#include "sizes.h"
#include "verify/device_copies.h"

namespace megamoe::bench {
namespace {

using cuda::check;
using cuda::StageClock;
using Json = nlohmann::ordered_json;

constexpr double kDeadlineS = 60.0;

struct Options {
  std::int64_t num_tokens = 4096;
  std::int64_t hidden_dim = 1024;
  std::int64_t intermediate_dim = 32768;
  std::int32_t num_experts = 16;
  std::int32_t top_k = 8;
  std::vector<int> groups = {2, 4, 8};
  std::vector<int> ctas = {8};
  std::vector<std::int64_t> sizes_tokens;  ///< of which exact and padded messages are compared
  int num_repeats = 7;
  int pause_ms = static_cast<int>(kBurstPause.count());  ///< before each timed pass
  std::string json_path;
  std::string trace_path;
  std::string command;  ///< that started the benchmark
  tools::LaunchOptions launch;
};

MoeShape shape_of(const Options& options) {
  return {options.num_tokens, options.hidden_dim, options.intermediate_dim, options.num_experts,
          options.top_k};
}

// ---- Messages --------------------------------------------------------------------------------

/// Milliseconds of messages of `bytes` to and from every other host at once; the slowest rank's
/// median.
double message_ms(Communicator& group, cuda::HostLink& link, int device, std::int64_t bytes) {
  const Topology topology = group.topology();
  const auto num_others = static_cast<std::int64_t>(topology.num_hosts() - 1);
  const cuda::DeviceMemory memory(device, 2 * num_others * bytes, "messages");
  std::vector<cuda::HostMessage> sends;
  std::vector<cuda::HostMessage> receives;
  for (int host = 0; host < topology.num_hosts(); ++host) {
    if (host == topology.host_of(group.rank())) continue;
    const auto place = static_cast<std::int64_t>(sends.size());
    sends.push_back({host, memory.data() + place * bytes, bytes});
    receives.push_back({host, memory.data() + (num_others + place) * bytes, bytes});
  }
  const cuda::OwnedStream stream;
  Event start;
  Event end;
  SamplesMs samples;
  constexpr int kWarmUps = 2;
  constexpr int kRepeats = 7;
  for (int i = -kWarmUps; i < kRepeats; ++i) {
    group.barrier("a timed message", kDeadlineS);
    start.record(stream.get());
    link.exchange(sends, receives, "a timed message", kDeadlineS, stream.get());
    end.record(stream.get());
    check(cudaStreamSynchronize(stream.get()), "a timed message");
    if (i >= 0) samples.push_back(end.ms_since(start));
  }
  const double mine = summarize(samples).median_ms;
  std::vector<double> all(group.size());
  group.all_gather(&mine, all.data(), sizeof mine, "times", kDeadlineS);
  return *std::max_element(all.begin(), all.end());
}

/// What all records of the run say about it.
struct Machine {
  RunInfo run;
  std::string hardware;
  std::string network;
  Json versions;
};

Machine machine_of(const Options& options, const Topology& topology, int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  const auto cuda_version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  };
  int runtime = 0;
  int driver = 0;
  int nccl = 0;
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  nccl::check(nccl::library().get_version(&nccl), "ncclGetVersion");
  const char* net = std::getenv("NCCL_NET");
  const char* interface = std::getenv("NCCL_SOCKET_IFNAME");
  return {run_info(options.command),
          std::to_string(topology.num_ranks()) + " x " + properties.name,
          std::string("NCCL_NET=") + (net == nullptr ? "" : net) +
              ", NCCL_SOCKET_IFNAME=" + (interface == nullptr ? "" : interface),
          {{"cuda", cuda_version(runtime)},
           {"driver", cuda_version(driver)},
           {"nccl", std::to_string(nccl / 10000) + "." + std::to_string(nccl / 100 % 100) + "." +
                        std::to_string(nccl % 100)}}};
}

void append(Json& records, Json record, const Machine& machine) {
  append_run(record, machine.run, machine.hardware);
  record["versions"].update(machine.versions);
  record["network"] = machine.network;
  records.push_back(std::move(record));
}

/// Adds records; returns the bytes a second, to and from all other hosts together, of the largest.
double time_messages(Communicator& group, cuda::HostLink& link, int device, int num_ctas,
                     const Machine& machine, Json& records) {
  double bytes_per_s = 0.0;
  for (const std::int64_t bytes : {std::int64_t{4} << 10, std::int64_t{1} << 20,
                                   std::int64_t{8} << 20, std::int64_t{32} << 20}) {
    const double ms = message_ms(group, link, device, bytes);
    const double gbps = 1e-6 * static_cast<double>(bytes) / ms;
    bytes_per_s = 1e9 * gbps * (group.topology().num_hosts() - 1);
    if (group.rank() == 0) {
      std::printf("messages of %6lld KB, %d CTAs: %8.3f ms, %6.2f GB/s each way\n",
                  static_cast<long long>(bytes >> 10), num_ctas, ms, gbps);
    }
    append(records,
           {{"benchmark", "message between hosts"},
            {"network_ctas", num_ctas},
            {"bytes", bytes},
            {"ms", ms},
            {"gbytes_per_s_each_way", gbps}},
           machine);
  }
  return bytes_per_s;
}

// ---- Exact or padded messages ----------------------------------------------------------------

void compare_sizes(const Options& options, Communicator& group, int device, int num_ctas,
                   const Machine& machine, Json& records) {
  auto& link = *dynamic_cast<cuda::OrderedCommunicator&>(group).hosts().link;
  for (const std::int64_t num_tokens : options.sizes_tokens) {
    for (const Routing routing : {Routing::uniform, Routing::zipf, Routing::one_expert}) {
      MoeShape shape = shape_of(options);
      shape.max_tokens = num_tokens;
      const SizesTimes times =
          time_sizes(group, link, device, shape,
                     routing_ids(routing, shape, num_tokens, group.size(), /*seed=*/1));
      if (group.rank() == 0) {
        std::printf(
            "transfers of a step, %lld tokens, %s: exact %.3f ms (%.1f MB; %.3f ms until sizes are "
            "known), padded %.3f ms (%.1f MB), to 1.25 of the mean %.3f ms (%.1f MB, %s)\n",
            static_cast<long long>(num_tokens), to_string(routing), times.exact.ms,
            1e-6 * static_cast<double>(times.exact.bytes), times.agree_ms, times.padded.ms,
            1e-6 * static_cast<double>(times.padded.bytes), times.padded_to_mean.ms,
            1e-6 * static_cast<double>(times.padded_to_mean.bytes),
            times.fits ? "fits" : "does not fit");
        std::fflush(stdout);
      }
      append(records,
             {{"benchmark", "sizes of messages"},
              {"network_ctas", num_ctas},
              {"hidden_dim", options.hidden_dim},
              {"num_experts", options.num_experts},
              {"top_k", options.top_k},
              {"tokens_per_rank", num_tokens},
              {"routing", to_string(routing)},
              {"agree_ms", times.agree_ms},
              {"exact_ms", times.exact.ms},
              {"exact_bytes", times.exact.bytes},
              {"padded_ms", times.padded.ms},
              {"padded_bytes", times.padded.bytes},
              {"padded_to_mean_ms", times.padded_to_mean.ms},
              {"padded_to_mean_bytes", times.padded_to_mean.bytes},
              {"padded_to_mean_fits", times.fits}},
             machine);
    }
  }
}

// ---- The layer -------------------------------------------------------------------------------

/// Of one pass, where its time went.
struct Spans {
  double total_ms = 0.0;
  double compute_ms = 0.0;  ///< products and what moves rows inside the host
  double first_ms = 0.0;    ///< until the first group's rows are there
  double last_ms = 0.0;     ///< results of the last group
};

using Stages = std::vector<StageClock::Stage>;

bool waits(const std::string& stage) {
  return stage.starts_with("await") || stage.starts_with("meet");
}

Spans spans_of(const Stages& compute, const Stages& network) {
  Spans spans;
  for (const StageClock::Stage& stage : compute) {
    spans.total_ms = std::max(spans.total_ms, stage.start_ms + stage.ms);
    if (!waits(stage.name) && stage.name != "stage_and_plan") spans.compute_ms += stage.ms;
  }
  for (const StageClock::Stage& stage : network) {
    if (stage.name == "results") spans.last_ms = stage.ms;
  }
  bool has_rows = false;
  for (const StageClock::Stage& stage : network) {
    if (stage.name == "results" || has_rows) break;
    spans.first_ms += waits(stage.name) ? 0.0 : stage.ms;
    has_rows = stage.name == "rows";
  }
  return spans;
}

Spans median(const std::vector<Spans>& all) {
  const auto of = [&](double Spans::*member) {
    SamplesMs samples;
    for (const Spans& spans : all) samples.push_back(spans.*member);
    return summarize(samples).median_ms;
  };
  return {of(&Spans::total_ms), of(&Spans::compute_ms), of(&Spans::first_ms), of(&Spans::last_ms)};
}

/// Of the rank whose pass took longest; all of it that rank's, so that parts belong together.
Spans slowest_rank(const Spans& mine, Communicator& group) {
  std::vector<Spans> all(group.size());
  group.all_gather(&mine, all.data(), sizeof mine, "times", kDeadlineS);
  return *std::ranges::max_element(all, {}, &Spans::total_ms);
}

struct Pass {
  Stages compute;
  Stages network;
};

struct LayerTimes {
  int num_groups = 1;
  Spans forward;  ///< medians of the slowest rank
  Spans backward;
  [[nodiscard]] Spans step() const {
    return {forward.total_ms + backward.total_ms, forward.compute_ms + backward.compute_ms,
            forward.first_ms + backward.first_ms, forward.last_ms + backward.last_ms};
  }
  Traffic traffic;
  Pass last_forward;
  Pass last_backward;
};

LayerTimes time_layer(const Options& options, Communicator& group, int device, Overlap overlap) {
  LayerTimes times;
  LayerConfig config;
  config.shape = shape_of(options);
  config.backend = Backend::cuda;
  config.overlap = overlap;
  config.memory_mode = MemoryMode::recompute;
  const auto ids_RTK =
      routing_ids(Routing::uniform, config.shape, options.num_tokens, group.size(), /*seed=*/1);
  config.row_capacity = std::max(resolved_row_capacity(config, group.size()),
                                 count_busiest(config.shape, ids_RTK).of_rank);
  times.traffic = busiest_between_hosts(config.shape, group.topology(), ids_RTK);
  RankTensors tensors(config, group.size(), group.rank(), device, ids_RTK[group.rank()]);
  Workspace workspace(config, group);
  MoeLayer layer(config, group, workspace);
  auto& memory = static_cast<cuda::CudaWorkspace&>(*workspace.impl().memory);
  const cuda::OwnedStream stream;
  memory.stages.switch_on();
  memory.network_stages.switch_on();
  const auto take = [&] {
    layer.check({stream.get()});
    const Stages network = memory.network_stages.take_beside(memory.stages);
    return Pass{memory.stages.take(), network};
  };
  std::vector<Spans> forward;
  std::vector<Spans> backward;
  constexpr int kWarmUps = 2;
  // A chip lowers its clock within tens of milliseconds of full load. Without overlap it rests
  // while rows travel; with overlap it does not. So that both begin alike, it rests before each
  // pass.
  const auto rest = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(options.pause_ms));
    group.barrier("a timed pass", kDeadlineS);
  };
  for (int i = -kWarmUps; i < options.num_repeats; ++i) {
    rest();
    const CallContext call =
        layer.forward(tensors.forward_input(), tensors.forward_output(), {stream.get()});
    times.last_forward = take();
    rest();
    layer.backward(call, tensors.backward_input(), tensors.backward_output(), {stream.get()});
    times.last_backward = take();
    if (i < 0) continue;
    forward.push_back(spans_of(times.last_forward.compute, times.last_forward.network));
    backward.push_back(spans_of(times.last_backward.compute, times.last_backward.network));
  }
  times.num_groups = static_cast<int>(
      std::ranges::count(times.last_forward.compute, "down", &StageClock::Stage::name));
  times.forward = slowest_rank(median(forward), group);
  times.backward = slowest_rank(median(backward), group);
  return times;
}

/// What a pass takes without overlap, and its parts by themselves.
struct Alone {
  double off_ms = 0.0;
  double compute_ms = 0.0;
  double transfer_ms = 0.0;  ///< its bytes at the bandwidth of large messages
};

struct AllAlone {
  Alone forward;
  Alone backward;
  [[nodiscard]] Alone step() const {
    return {forward.off_ms + backward.off_ms, forward.compute_ms + backward.compute_ms,
            forward.transfer_ms + backward.transfer_ms};
  }
};

/// `off`: times without overlap.
AllAlone alone_of(const LayerTimes& off, double bytes_per_s) {
  const auto ms_of = [&](std::int64_t bytes) {
    return 1e3 * static_cast<double>(bytes) / bytes_per_s;
  };
  return {{off.forward.total_ms, off.forward.compute_ms, ms_of(off.traffic.forward_bytes)},
          {off.backward.total_ms, off.backward.compute_ms, ms_of(off.traffic.backward_bytes)}};
}

double longer_ms(const Alone& alone) { return std::max(alone.compute_ms, alone.transfer_ms); }

/// What overlap can reach: the longer of the two, and what nothing can hide.
double bound_ms(const Spans& spans, const Alone& alone) {
  return longer_ms(alone) + spans.first_ms + spans.last_ms;
}

Json to_json(const Spans& spans, const Alone& alone, std::int64_t bytes) {
  return {{"ms", spans.total_ms},
          {"off_ms", alone.off_ms},
          {"bytes", bytes},
          {"compute_ms", alone.compute_ms},
          {"transfer_ms", alone.transfer_ms},
          {"first_group_ms", spans.first_ms},
          {"last_group_ms", spans.last_ms},
          {"bound_ms", bound_ms(spans, alone)},
          {"of_bound", spans.total_ms / bound_ms(spans, alone)},
          {"of_longer", spans.total_ms / longer_ms(alone)},
          {"of_off", spans.total_ms / alone.off_ms}};
}

void print(const char* pass, const Spans& spans, const Alone& alone) {
  std::printf(
      "    %-8s %7.2f ms, %.2f of %.2f without overlap; alone: compute %.2f, transfer %.2f, %.2f "
      "of "
      "the longer; first %.2f, last %.2f, %.2f of the bound\n",
      pass, spans.total_ms, spans.total_ms / alone.off_ms, alone.off_ms, alone.compute_ms,
      alone.transfer_ms, spans.total_ms / longer_ms(alone), spans.first_ms, spans.last_ms,
      spans.total_ms / bound_ms(spans, alone));
}

/// Perfetto and chrome://tracing read it.
void write_trace(const std::string& path, const Pass& pass) {
  Json events = Json::array();
  const auto add = [&](const Stages& stages, int thread, const char* name) {
    events.push_back({{"ph", "M"},
                      {"pid", 0},
                      {"tid", thread},
                      {"name", "thread_name"},
                      {"args", {{"name", name}}}});
    for (const StageClock::Stage& stage : stages) {
      events.push_back({{"ph", "X"},
                        {"pid", 0},
                        {"tid", thread},
                        {"name", stage.name},
                        {"ts", stage.start_ms * 1e3},
                        {"dur", stage.ms * 1e3}});
    }
  };
  add(pass.compute, 0, "caller's stream");
  add(pass.network, 1, "network");
  std::ofstream(path) << Json{{"traceEvents", events}}.dump();
}

void run_rank(const Options& options, Communicator& hosts) {
  const int device = verify::cuda_device_of(hosts.topology(), hosts.rank());
  const cuda::CurrentDevice current(device);
  const bool speaks = hosts.rank() == 0;
  const Machine machine = machine_of(options, hosts.topology(), device);
  Json records = Json::array();
  if (speaks) {
    std::printf("%s\n%lld tokens a rank, H=%lld, I=%lld, E=%d, K=%d, recompute\n",
                hosts.topology().describe().c_str(), static_cast<long long>(options.num_tokens),
                static_cast<long long>(options.hidden_dim),
                static_cast<long long>(options.intermediate_dim), options.num_experts,
                options.top_k);
  }
  for (const int ctas : options.ctas) {
    AllAlone alone;
    double bytes_per_s = 0.0;
    for (int i = -1; i < static_cast<int>(options.groups.size()); ++i) {
      const Overlap overlap = i < 0 ? Overlap::off : Overlap::on;
      const int asked = i < 0 ? 1 : options.groups[i];
      const auto group =
          make_cuda_communicator(hosts, device, {.network_groups = asked, .network_ctas = ctas});
      if (i < 0) {
        auto& link = *dynamic_cast<cuda::OrderedCommunicator&>(*group).hosts().link;
        bytes_per_s = time_messages(*group, link, device, ctas, machine, records);
        compare_sizes(options, *group, device, ctas, machine, records);
      }
      const LayerTimes times = time_layer(options, *group, device, overlap);
      if (i < 0) alone = alone_of(times, bytes_per_s);
      if (!speaks) continue;
      const int groups = times.num_groups;
      std::printf("  %d group%s%s, %d CTAs\n", groups, groups == 1 ? "" : "s",
                  asked == 0 ? " by default" : "", ctas);
      print("forward", times.forward, alone.forward);
      print("backward", times.backward, alone.backward);
      print("step", times.step(), alone.step());
      std::fflush(stdout);
      const Traffic& traffic = times.traffic;
      Json record = {{"layer", "megamoe"},
                     {"benchmark", "layer over hosts"},
                     {"times_of", "slowest rank"},
                     {"backend", "cuda"},
                     {"mode", "recompute"},
                     {"overlap", i < 0 ? "off" : "on"},
                     {"groups", groups},
                     {"groups_by_default", asked == 0},
                     {"pause_ms", options.pause_ms},
                     {"network_ctas", ctas},
                     {"hidden_dim", options.hidden_dim},
                     {"intermediate_dim", options.intermediate_dim},
                     {"num_experts", options.num_experts},
                     {"top_k", options.top_k},
                     {"tokens_per_rank", options.num_tokens},
                     {"ranks", hosts.size()},
                     {"hosts", hosts.topology().num_hosts()},
                     {"routing", "uniform"},
                     {"forward", to_json(times.forward, alone.forward, traffic.forward_bytes)},
                     {"backward", to_json(times.backward, alone.backward, traffic.backward_bytes)},
                     {"step", to_json(times.step(), alone.step(),
                                      traffic.forward_bytes + traffic.backward_bytes)}};
      append(records, std::move(record), machine);
      if (options.trace_path.empty()) continue;
      const std::string name =
          options.trace_path + "." + std::to_string(groups) + (asked == 0 ? "d" : "");
      write_trace(name + ".forward.json", times.last_forward);
      write_trace(name + ".backward.json", times.last_backward);
    }
  }
  if (speaks && !options.json_path.empty()) {
    std::ofstream(options.json_path) << records.dump(1) << "\n";
  }
  hosts.barrier("the end of the benchmark", kDeadlineS);
}

/// Rank 0 listens there, so nobody does any more.
std::string free_address() {
  const network::Socket socket = network::listen_on({"127.0.0.1", 0});
  return "127.0.0.1:" + std::to_string(network::port_of(socket));
}

/// This program again, once a stand-in host, with a GPU each.
int run_stand_ins(int argc, char** argv) {
  if (num_cuda_devices() < 2) {
    std::fprintf(stderr, "hosts_bench: needs two GPUs, a stand-in host each\n");
    return 1;
  }
  const std::string rendezvous = free_address();
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  setenv("NCCL_NET", "Socket", 1);
  setenv("NCCL_IB_DISABLE", "1", 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  std::vector<pid_t> processes;
  for (int host = 0; host < 2; ++host) {
    setenv("NCCL_HOSTID", ("stand-in-" + std::to_string(host)).c_str(), 1);
    setenv("CUDA_VISIBLE_DEVICES", std::to_string(host).c_str(), 1);
    std::vector<std::string> arguments(argv, argv + argc);
    for (const std::string& added :
         {std::string("--launched"), std::string("--rank"), std::to_string(host),
          std::string("--world-size"), std::string("2"), std::string("--rendezvous"), rendezvous,
          std::string("--host-name"), "stand-in " + std::to_string(host)}) {
      arguments.push_back(added);
    }
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    pid_t process = 0;
    if (posix_spawn(&process, "/proc/self/exe", nullptr, nullptr, pointers.data(), environ) != 0) {
      std::perror("hosts_bench");
      return 1;
    }
    processes.push_back(process);
  }
  int result = 0;
  for (const pid_t process : processes) {
    int status = 0;
    waitpid(process, &status, 0);
    if (status != 0) result = 1;
  }
  return result;
}

}  // namespace
}  // namespace megamoe::bench

int main(int argc, char** argv) {
  megamoe::bench::Options options;
  CLI::App app("What the network between hosts costs a layer on GPUs");
  app.option_defaults()->always_capture_default();
  app.add_option("--tokens", options.num_tokens, "Tokens of each rank");
  app.add_option("--hidden", options.hidden_dim, "Hidden size H");
  app.add_option("--intermediate", options.intermediate_dim, "Intermediate size I");
  app.add_option("--experts", options.num_experts, "Experts E");
  app.add_option("--top-k", options.top_k, "Slots K of a token");
  app.add_option("--groups", options.groups, "Groups of experts with overlap; 0: as by default");
  app.add_option("--ctas", options.ctas, "CTAs of a transfer");
  app.add_option("--sizes", options.sizes_tokens,
                 "Tokens of each rank for which exact and padded messages are compared");
  app.add_option("--repeats", options.num_repeats, "Timed passes");
  app.add_option("--pause-ms", options.pause_ms, "Rest before each timed pass");
  app.add_option("--json", options.json_path, "Also write records to this file");
  app.add_option("--trace", options.trace_path,
                 "Write timelines of both streams to FILE.<groups>.{forward,backward}.json");
  megamoe::tools::add_launch_options(app, options.launch);
  CLI11_PARSE(app, argc, argv);
  for (int i = 0; i < argc && std::string(argv[i]) != "--launched"; ++i) {
    options.command += (i > 0 ? " " : "") + std::string(argv[i]);
  }
  try {
    if (!options.launch.is_launched) return megamoe::bench::run_stand_ins(argc, argv);
    const auto hosts = megamoe::tools::join_launched_group(options.launch);
    megamoe::bench::run_rank(options, *hosts);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hosts_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
