#include <mutex>

#include "bench/cuda_bursts.h"
#include "bench/layer_stack.h"
#include "bench/step_bench.h"
#include "cuda/runtime.h"
#include "megamoe/cuda.h"
#include "verify/device_copies.h"

namespace megamoe::bench {
namespace {

using cuda::check;
using cuda::CurrentDevice;
using cuda::OwnedStream;

constexpr int kNumWarmups = 3;

/// Memory of the current device.
class CudaStackMemory final : public StackMemory {
 public:
  explicit CudaStackMemory(int device) : device_(device) {}
  std::shared_ptr<std::byte> allocate(std::int64_t bytes) override {
    const auto memory =
        std::make_shared<cuda::DeviceMemory>(device_, bytes, "a tensor of a stack of layers");
    check(cudaMemset(memory->data(), 0, static_cast<std::size_t>(bytes)), "clearing a tensor");
    return {memory, memory->data()};
  }
  void upload(std::byte* to, const void* host, std::int64_t bytes) override {
    check(cudaMemcpy(to, host, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice), "upload");
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    check(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice), "copy");
  }

 private:
  int device_;
};

/// Passes of one rank through its stack.
class Passes {
 public:
  Passes(LayerStack& stack, Communicator& group, double deadline_s)
      : stack_(stack), group_(group), deadline_s_(deadline_s) {}

  PassTimes time(std::int64_t num_layers, int num_repeats) {
    PassTimes times;
    run_in_bursts(
        group_, deadline_s_, {kNumWarmups, num_repeats}, [&] { run(num_layers); },
        [&] { return end_.ms_since(start_); },
        [&](int /*repeat*/) {
          times.forward_ms.push_back(middle_.ms_since(start_));
          times.backward_ms.push_back(end_.ms_since(middle_));
        });
    return times;
  }

 private:
  void run(std::int64_t num_layers) {
    check(cudaStreamSynchronize(stream_.get()), "a timed step");
    group_.barrier("a timed step", deadline_s_);
    start_.record(stream_.get());
    stack_.forward(num_layers, {stream_.get()});
    middle_.record(stream_.get());
    stack_.backward(num_layers, {stream_.get()});
    end_.record(stream_.get());
    stack_.check({stream_.get()});
  }

  LayerStack& stack_;
  Communicator& group_;
  double deadline_s_;
  OwnedStream stream_;
  Event start_, middle_, end_;
};

/// Of the device that has least; refuses what does not fit.
void require_device_memory(const StepProblem& problem) {
  const int num_ranks = problem.num_ranks();
  const StepState state = step_state(problem.config, num_ranks, problem.num_layers);
  const int num_devices = verify::cuda_device_of(num_ranks - 1, num_ranks) + 1;
  for (int device = 0; device < num_devices; ++device) {
    const CurrentDevice current(device);
    std::size_t free_bytes = 0;
    std::size_t all_bytes = 0;
    check(cudaMemGetInfo(&free_bytes, &all_bytes), "the device's free memory");
    require_memory(state, num_devices == 1 ? num_ranks : 1, static_cast<std::int64_t>(free_bytes),
                   ("device " + std::to_string(device)).c_str());
  }
}

}  // namespace

StepTimes time_step_on_cuda(const StepProblem& problem, int num_repeats) {
  require_device_memory(problem);
  const LayerConfig& config = problem.config;
  StepTimes times;
  std::mutex mutex;  // of `times`
  run_ranks(problem.num_ranks(), [&](Communicator& threads) {
    const int rank = threads.rank();
    const int device = verify::cuda_device_of(rank, problem.num_ranks());
    const CurrentDevice current(device);
    const auto group = make_cuda_communicator(threads, device);
    CudaStackMemory memory(device);
    LayerStack stack(config, problem.num_layers, *group, memory, problem.ids_RTK[rank]);
    check(cudaDeviceSynchronize(), "a stack's tensors");
    Passes passes(stack, *group, config.entry_deadline_s);
    const PassTimes one_layer = passes.time(1, num_repeats);
    const PassTimes step = passes.time(problem.num_layers, num_repeats);
    {
      const std::lock_guard lock(mutex);
      keep_slowest(times.one_layer, one_layer);
      keep_slowest(times.step, step);
    }
    group->barrier("the end of a benchmark", config.entry_deadline_s);
  });
  return times;
}

}  // namespace megamoe::bench
