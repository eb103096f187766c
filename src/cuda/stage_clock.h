// Where the time of a call goes: an event between the launches of its stages, while switched on.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cuda/runtime.h"

namespace megamoe::cuda {

class StageClock {
 public:
  StageClock() = default;
  StageClock(const StageClock&) = delete;
  StageClock& operator=(const StageClock&) = delete;
  ~StageClock() { clear(); }

  /// Off at first: then calls of the members below do nothing. Not within a stream capture.
  void switch_on() { is_on_ = true; }

  /// Stage `name` starts at this point of the stream and ends where the next one starts.
  void start(const char* name, cudaStream_t stream) {
    if (!is_on_) return;
    cudaEvent_t event = nullptr;
    check(cudaEventCreate(&event), "cudaEventCreate");
    check(cudaEventRecord(event, stream), "cudaEventRecord");
    marks_.emplace_back(name, event);
  }

  struct Stage {
    std::string name;
    double start_ms;  ///< since the first of them, or of those that it is set beside
    double ms;
  };
  /// The stages since the last call of this, in order; waits for the last one's end.
  std::vector<Stage> take() { return take_beside(*this); }
  /// The same, on the time line of `other`, whose stages have not been taken yet.
  std::vector<Stage> take_beside(const StageClock& other) {
    std::vector<Stage> stages;
    for (std::size_t i = 0; i + 1 < marks_.size(); ++i) {
      check(cudaEventSynchronize(marks_[i + 1].second), "cudaEventSynchronize");
      if (marks_[i].first == kEnd) continue;
      float start_ms = 0.0F;
      float ms = 0.0F;
      check(cudaEventElapsedTime(&start_ms, other.marks_[0].second, marks_[i].second),
            "stage start");
      check(cudaEventElapsedTime(&ms, marks_[i].second, marks_[i + 1].second), "stage time");
      stages.push_back({marks_[i].first, start_ms, ms});
    }
    clear();
    return stages;
  }

  static constexpr const char* kEnd = "end";

 private:
  void clear() {
    for (const auto& mark : marks_) cudaEventDestroy(mark.second);
    marks_.clear();
  }

  bool is_on_ = false;
  std::vector<std::pair<std::string, cudaEvent_t>> marks_;
};

}  // namespace megamoe::cuda
