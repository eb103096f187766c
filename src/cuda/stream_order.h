// Calls on one workspace run in the order in which they were enqueued, whatever their streams.
#pragma once

#include "cuda/runtime.h"

namespace megamoe::cuda {

/// Within a stream capture nothing is recorded or awaited: who replays graphs orders them.
class StreamOrder {
 public:
  explicit StreamOrder(int device) {
    const CurrentDevice current(device);
    check(cudaEventCreateWithFlags(&last_call_, cudaEventDisableTiming), "cudaEventCreate");
  }
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;
  ~StreamOrder() { cudaEventDestroy(last_call_); }

  /// Before a call's first launch.
  void enter(cudaStream_t stream) {
    if (!has_call_ || stream == last_stream_ || is_capturing(stream)) return;
    check(cudaStreamWaitEvent(stream, last_call_, 0), "cudaStreamWaitEvent");
  }
  /// After its last.
  void leave(cudaStream_t stream) {
    if (is_capturing(stream)) return;
    check(cudaEventRecord(last_call_, stream), "cudaEventRecord");
    last_stream_ = stream;
    has_call_ = true;
  }
  /// Waits for everything that was enqueued.
  void synchronize() {
    if (has_call_) cudaEventSynchronize(last_call_);
  }

 private:
  static bool is_capturing(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  cudaEvent_t last_call_ = nullptr;
  cudaStream_t last_stream_ = nullptr;
  bool has_call_ = false;
};

}  // namespace megamoe::cuda
