// Work of a call that runs beside the caller's stream for a while.
#pragma once

#include "cuda/runtime.h"

namespace megamoe::cuda {

/// A stream of its own that is forked from the caller's and joined with it again, by events: also
/// within a stream capture.
class SideStream {
 public:
  explicit SideStream(int device) {
    const CurrentDevice current(device);
    int least = 0;
    int greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
    // What runs beside is small and awaited.
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "a stream");
    for (cudaEvent_t* event : {&forked_, &joined_}) {
      check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
    }
  }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream() {
    cudaEventDestroy(forked_);
    cudaEventDestroy(joined_);
    cudaStreamDestroy(stream_);
  }

  /// Runs what `work(stream)` enqueues after what `stream` holds now, and before what is enqueued
  /// on it after join().
  template <class Work>
  void run(cudaStream_t stream, const Work& work) {
    check(cudaEventRecord(forked_, stream), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream_, forked_, 0), "cudaStreamWaitEvent");
    work(stream_);
    check(cudaEventRecord(joined_, stream_), "cudaEventRecord");
  }
  void join(cudaStream_t stream) {
    check(cudaStreamWaitEvent(stream, joined_, 0), "cudaStreamWaitEvent");
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr;
  cudaEvent_t joined_ = nullptr;
};

}  // namespace megamoe::cuda
