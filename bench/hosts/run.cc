#include "run.h"

#include <cstdio>
#include <optional>

#include "bench/routing.h"
#include "common/json_file.h"
#include "cuda/stream_order.h"
#include "layer_report.h"
#include "layer_times.h"
#include "megamoe/cuda.h"
#include "messages.h"
#include "records.h"
#include "sizes.h"
#include "verify/device_copies.h"

namespace megamoe::bench {
namespace {

void compare_sizes(const Options& options, Communicator& group, int device, int num_ctas,
                   const Machine& machine, Json& records) {
  auto& link = *dynamic_cast<cuda::OrderedCommunicator&>(group).hosts().link;
  for (const std::int64_t num_tokens : options.sizes_tokens) {
    for (const Routing routing : {Routing::uniform, Routing::zipf, Routing::one_expert}) {
      MoeShape shape = options.shape;
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
              {"hidden_dim", shape.hidden_dim},
              {"num_experts", shape.num_experts},
              {"top_k", shape.top_k},
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

}  // namespace

void run_rank(const Options& options, Communicator& hosts) {
  const int device = verify::cuda_device_of(hosts.topology(), hosts.rank());
  const cuda::CurrentDevice current(device);
  const bool speaks = hosts.rank() == 0;
  const Machine machine = machine_of(options.command, hosts.topology(), device);
  Json records = Json::array();
  std::optional<tools::JsonFile> file;
  if (speaks && !options.json_path.empty()) file.emplace(options.json_path);
  if (speaks) {
    const MoeShape& shape = options.shape;
    std::printf("%s\n%lld tokens a rank, H=%lld, I=%lld, E=%d, K=%d, recompute\n",
                hosts.topology().describe().c_str(), static_cast<long long>(shape.max_tokens),
                static_cast<long long>(shape.hidden_dim),
                static_cast<long long>(shape.intermediate_dim), shape.num_experts, shape.top_k);
  }
  for (const int ctas : options.ctas) {
    AllAlone alone;
    double bytes_per_s = 0.0;
    for (int i = -1; i < static_cast<int>(options.groups.size()); ++i) {
      const Way way =
          i < 0 ? Way{Overlap::off, 1, ctas} : Way{Overlap::on, options.groups[i], ctas};
      const auto group = make_cuda_communicator(
          hosts, device, {.network_groups = way.asked_groups, .network_ctas = ctas});
      if (i < 0) {
        auto& link = *dynamic_cast<cuda::OrderedCommunicator&>(*group).hosts().link;
        bytes_per_s = time_messages(*group, link, device, ctas, machine, records);
        compare_sizes(options, *group, device, ctas, machine, records);
      }
      const LayerTimes times = time_layer(options, *group, device, way.overlap);
      if (i < 0) alone = alone_of(times, bytes_per_s);
      if (!speaks) continue;
      print(way, times, alone);
      append(records, record_of(options, hosts.topology(), way, times, alone), machine);
      if (!options.trace_path.empty()) write_traces(options.trace_path, way, times);
    }
  }
  if (file) file->write(records);
  hosts.barrier("the end of the benchmark", kDeadlineS);
}

}  // namespace megamoe::bench
