// Passes of all ranks timed in bursts. A chip lowers its clock within tens of milliseconds of full
// load, so what is to be compared (the layer, other layers, a stack of them, dense products) runs
// in bursts of about the same length, each after a pause.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "cuda/runtime.h"
#include "megamoe/communicator.h"

namespace megamoe::bench {

inline constexpr double kBurstMs = 40.0;
inline constexpr std::chrono::milliseconds kBurstPause{200};

class Event {
 public:
  Event() { cuda::check(cudaEventCreate(&event_), "an event"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record(cudaStream_t stream) { cuda::check(cudaEventRecord(event_, stream), "an event"); }
  [[nodiscard]] double ms_since(const Event& start) const {
    float ms = 0.0F;
    cuda::check(cudaEventElapsedTime(&ms, start.event_, event_), "elapsed time");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

struct BurstCounts {
  int num_warmups;
  int num_repeats;
};

/// Calls pass() for the warm-ups, whose last one, of `pass_ms()`, tells rank 0 how many make a
/// burst; then for every repeat, and once more, not counted, at the start of each burst;
/// note(repeat) follows each repeat. Collective.
template <class Pass, class PassMs, class Note>
void run_in_bursts(Communicator& group, double deadline_s, const BurstCounts& counts,
                   const Pass& pass, const PassMs& pass_ms, const Note& note) {
  for (int warm_up = 0; warm_up < counts.num_warmups; ++warm_up) pass();
  float length = 0.0F;
  if (group.rank() == 0) {
    length = std::max(1.0F, static_cast<float>(std::floor(kBurstMs / pass_ms())));
  }
  group.all_reduce_sum(&length, 1, "the length of a burst", deadline_s);
  for (int repeat = 0; repeat < counts.num_repeats; ++repeat) {
    if (repeat % static_cast<int>(length) == 0) {
      std::this_thread::sleep_for(kBurstPause);
      pass();
    }
    pass();
    note(repeat);
  }
}

}  // namespace megamoe::bench
