#include <algorithm>
#include <chrono>
#include <memory>

#include "bench/cuda_rank_tensors.h"
#include "cuda/workspace.h"
#include "device/flags.cuh"
#include "layer/workspace.h"
#include "megamoe/cuda.h"
#include "trace/record.h"
#include "trace/region.h"
#include "verify/device_copies.h"

namespace megamoe::timeline {
namespace {

using cuda::check;
using Clock = std::chrono::steady_clock;

constexpr int kNumWarmups = 4;
constexpr int kNumClockReadings = 50;

__global__ void read_timer_kernel(std::uint64_t* ns) { *ns = device::now_ns(); }

std::int64_t host_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch())
      .count();
}

/// The device's global timer minus the host's clock. Timers of two devices differ: the host's
/// clock is what they have in common. The reading that took least is off by half of that, some
/// microseconds.
std::int64_t timer_offset_ns(cudaStream_t stream, std::uint64_t* timer) {
  std::int64_t best_ns = 0;
  std::int64_t offset_ns = 0;
  for (int reading = 0; reading < kNumClockReadings; ++reading) {
    const std::int64_t before = host_ns();
    read_timer_kernel<<<1, 1, 0, stream>>>(timer);
    check(cudaStreamSynchronize(stream), "reading a device's timer");
    const std::int64_t after = host_ns();
    if (reading > 0 && after - before >= best_ns) continue;
    best_ns = after - before;
    offset_ns = static_cast<std::int64_t>(*static_cast<volatile std::uint64_t*>(timer)) -
                (before + best_ns / 2);
  }
  return offset_ns;
}

/// Device memory for the logs of one pass, and which launch wrote which.
class PassLog {
 public:
  explicit PassLog(int device)
      : blocks_per_launch_(num_multiprocessors(device)),
        memory_(device, num_bytes(), "the log of a pass"),
        launches_(reinterpret_cast<trace::BlockLog*>(memory_.data()), trace::Launches::kMaxLaunches,
                  blocks_per_launch_) {
    check(cudaMemset(memory_.data(), 0, static_cast<std::size_t>(num_bytes())),
          "the log of a pass");
    check(cudaDeviceSynchronize(), "the log of a pass");
  }

  [[nodiscard]] trace::Launches* launches() { return &launches_; }

  [[nodiscard]] std::vector<KernelRun> decode(std::uint64_t origin_ns) const {
    std::vector<KernelRun> kernels;
    const auto launch_blocks = std::make_unique<trace::BlockLog[]>(blocks_per_launch_);
    const std::size_t launch_bytes = sizeof(trace::BlockLog) * blocks_per_launch_;
    for (int launch = 0; launch < launches_.size(); ++launch) {
      check(cudaMemcpy(launch_blocks.get(), memory_.data() + launch * launch_bytes, launch_bytes,
                       cudaMemcpyDeviceToHost),
            "the log of a launch");
      kernels.push_back(timeline::decode(launches_.product(launch), launch_blocks.get(),
                                         blocks_per_launch_, origin_ns));
    }
    return kernels;
  }

 private:
  static int num_multiprocessors(int device) {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
          "multiprocessors");
    return count;
  }
  [[nodiscard]] std::int64_t num_bytes() const {
    return static_cast<std::int64_t>(sizeof(trace::BlockLog)) * blocks_per_launch_ *
           trace::Launches::kMaxLaunches;
  }

  int blocks_per_launch_;
  cuda::DeviceMemory memory_;
  trace::Launches launches_;
};

/// One rank's layer, and what it takes to run and record it.
class RecordedRank {
 public:
  RecordedRank(const LayerConfig& config, Communicator& threads, int device,
               const std::vector<std::int32_t>& ids)
      : config_(config),
        group_(make_cuda_communicator(threads, device)),
        tensors_(config, threads.size(), threads.rank(), device, ids),
        workspace_(config, *group_),
        layer_(config, *group_, workspace_),
        log_(device) {}

  void warm_up() {
    for (int pass = 0; pass < kNumWarmups; ++pass) {
      forward();
      backward();
    }
  }

  GpuTimeline record(Pass pass) {
    const std::int64_t offset_ns = timer_offset_ns(stream_.get(), timer_.get());
    if (pass == Pass::backward) forward();
    start_recording();
    // All ranks take the same moment of the host's clock as zero.
    const std::int64_t now_ns = host_ns();
    std::vector<std::int64_t> now_ns_R(group_->size());
    group_->all_gather(&now_ns, now_ns_R.data(), sizeof now_ns, "the start of a recording",
                       config_.entry_deadline_s);
    read_timer_kernel<<<1, 1, 0, stream_.get()>>>(timer_.get());
    check(cudaGetLastError(), "reading a device's timer");
    if (pass == Pass::forward) {
      forward();
    } else {
      backward();
    }
    memory().trace = nullptr;
    const auto origin = static_cast<std::uint64_t>(now_ns_R[0] + offset_ns);
    GpuTimeline timeline{group_->rank(), stages(origin), log_.decode(origin)};
    group_->barrier("the end of a recording", config_.entry_deadline_s);
    return timeline;
  }

 private:
  cuda::CudaWorkspace& memory() {
    return static_cast<cuda::CudaWorkspace&>(*workspace_.impl().memory);
  }

  void forward() {
    call_ = layer_.forward(tensors_.forward_input(), tensors_.forward_output(), {stream_.get()});
    layer_.check({stream_.get()});
    group_->barrier("a recorded pass", config_.entry_deadline_s);
  }
  void backward() {
    layer_.backward(call_, tensors_.backward_input(), tensors_.backward_output(), {stream_.get()});
    layer_.check({stream_.get()});
    group_->barrier("a recorded pass", config_.entry_deadline_s);
  }

  void start_recording() {
    memory().stages.switch_on();
    memory().trace = log_.launches();
  }

  /// The stream's stages begin where the kernel that read the timer has ended.
  std::vector<Stage> stages(std::uint64_t origin) {
    const std::uint64_t read_ns = *static_cast<volatile std::uint64_t*>(timer_.get());
    const double begin_us = static_cast<double>(static_cast<std::int64_t>(read_ns - origin)) * 1e-3;
    std::vector<Stage> result;
    for (const cuda::StageClock::Stage& stage : memory().stages.take()) {
      const double start_us = begin_us + stage.start_ms * 1e3;
      result.push_back({stage.name, start_us, start_us + stage.ms * 1e3});
    }
    return result;
  }

  LayerConfig config_;
  std::unique_ptr<Communicator> group_;
  bench::RankTensors tensors_;
  Workspace workspace_;
  MoeLayer layer_;
  cuda::OwnedStream stream_;
  cuda::PinnedValue<std::uint64_t> timer_;
  PassLog log_;
  CallContext call_;
};

}  // namespace

bool can_record() { return true; }

std::vector<GpuTimeline> record_pass(const LayerConfig& config,
                                     const std::vector<std::vector<std::int32_t>>& ids_RTK,
                                     Pass pass) {
  const int num_ranks = static_cast<int>(ids_RTK.size());
  std::vector<GpuTimeline> timelines(num_ranks);
  run_ranks(num_ranks, [&](Communicator& threads) {
    const int device = verify::cuda_device_of(threads.rank(), num_ranks);
    const cuda::CurrentDevice current(device);
    RecordedRank rank(config, threads, device, ids_RTK[threads.rank()]);
    rank.warm_up();
    timelines[threads.rank()] = rank.record(pass);
  });
  return timelines;
}

}  // namespace megamoe::timeline
