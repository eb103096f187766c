#include <vector>

#include "bench/sm_clock.h"
#include "kernels/launch.h"

namespace megamoe::bench {
namespace {

struct Stamp {
  std::uint64_t cycles;
  std::uint64_t ns;
};

constexpr int kThreads = 1024;  // so that blocks spread over all multiprocessors

__global__ void stamp_kernel(Stamp* stamps_S, unsigned num_sms) {
  if (threadIdx.x != 0) return;
  unsigned sm = 0;
  Stamp stamp{};
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(stamp.cycles));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(stamp.ns));
  if (sm < num_sms) stamps_S[sm] = stamp;
}

}  // namespace

SmClock::SmClock(int device)
    : num_sms_(gpu::num_multiprocessors()),
      stamps_(device, 2 * num_sms_ * static_cast<std::int64_t>(sizeof(Stamp)),
              "stamps of the clock") {}

void SmClock::stamp(int point, cudaStream_t stream) {
  Stamp* stamps_S = reinterpret_cast<Stamp*>(stamps_.data()) + point * num_sms_;
  cuda::check(cudaMemsetAsync(stamps_S, 0, num_sms_ * sizeof(Stamp), stream), "the clock's stamps");
  stamp_kernel<<<num_sms_, kThreads, 0, stream>>>(stamps_S, static_cast<unsigned>(num_sms_));
  gpu::check_launch("a stamp of the clock");
}

double SmClock::ghz(cudaStream_t stream) const {
  std::vector<Stamp> stamps(2 * num_sms_);
  cuda::check(cudaMemcpyAsync(stamps.data(), stamps_.data(), stamps.size() * sizeof(Stamp),
                              cudaMemcpyDeviceToHost, stream),
              "the clock's stamps");
  cuda::check(cudaStreamSynchronize(stream), "the clock's stamps");
  double sum = 0.0;
  int num_seen = 0;
  for (int sm = 0; sm < num_sms_; ++sm) {
    const Stamp& start = stamps[sm];
    const Stamp& end = stamps[num_sms_ + sm];
    if (start.ns == 0 || end.ns <= start.ns) continue;
    sum += static_cast<double>(end.cycles - start.cycles) / static_cast<double>(end.ns - start.ns);
    ++num_seen;
  }
  return num_seen == 0 ? 0.0 : sum / num_seen;
}

}  // namespace megamoe::bench
