#include "messages.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "bench/cuda_bursts.h"
#include "bench/samples.h"
#include "cuda/runtime.h"
#include "cuda/stream_order.h"
#include "options.h"

namespace megamoe::bench {
namespace {

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
    cuda::check(cudaStreamSynchronize(stream.get()), "a timed message");
    if (i >= 0) samples.push_back(end.ms_since(start));
  }
  const double mine = summarize(samples).median_ms;
  std::vector<double> all(group.size());
  group.all_gather(&mine, all.data(), sizeof mine, "times", kDeadlineS);
  return *std::max_element(all.begin(), all.end());
}

}  // namespace

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

}  // namespace megamoe::bench
