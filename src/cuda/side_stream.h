// Work of a call that runs beside the caller's stream for a while.
#pragma once

#include "cuda/runtime.h"

namespace megamoe::cuda {

/// A stream of its own that is forked from the caller's and joined with it again, by events: also
/// within a stream capture.
class SideStream {
 public:
  /// The blocks of which of two kernels get SMs that become free: those of this stream, or those
  /// of a stream that has CUDA's default priority.
  enum class Priority { before_others, as_others };

  SideStream(int device, Priority priority) : SideStream(CurrentDevice(device), priority) {}
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream() { cudaStreamDestroy(stream_); }

  [[nodiscard]] cudaStream_t get() const { return stream_; }

  /// False while a capture, not ended yet, holds the side stream and is not that of `stream`.
  [[nodiscard]] bool can_fork_from(cudaStream_t stream) const {
    const Capture own = capture_of(stream_);
    if (own.status == cudaStreamCaptureStatusNone) return true;
    const Capture other = capture_of(stream);
    return own.status == other.status && own.id == other.id;
  }

  /// What is enqueued on stream() runs after what `stream` holds at the construction, and before
  /// what is enqueued on it after join(). An exception joins as well: a fork left open would spoil
  /// a capture, and let the next call run beside the rest of this one.
  class Fork {
   public:
    Fork(const SideStream& side, cudaStream_t stream) : side_(side), stream_(stream) {
      check(cudaEventRecord(side.forked_.get(), stream), "cudaEventRecord");
      check(cudaStreamWaitEvent(side.stream_, side.forked_.get(), 0), "cudaStreamWaitEvent");
    }
    Fork(const Fork&) = delete;
    Fork& operator=(const Fork&) = delete;
    ~Fork() {
      if (is_joined_) return;
      cudaEventRecord(side_.joined_.get(), side_.stream_);
      cudaStreamWaitEvent(stream_, side_.joined_.get(), 0);
    }

    [[nodiscard]] cudaStream_t stream() const { return side_.stream_; }
    void join() {
      check(cudaEventRecord(side_.joined_.get(), side_.stream_), "cudaEventRecord");
      check(cudaStreamWaitEvent(stream_, side_.joined_.get(), 0), "cudaStreamWaitEvent");
      is_joined_ = true;
    }

   private:
    const SideStream& side_;
    cudaStream_t stream_;
    bool is_joined_ = false;
  };

 private:
  SideStream(const CurrentDevice& /*device*/, Priority priority) {
    int least = 0;
    int greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                       priority == Priority::before_others ? greatest : 0),
          "a stream");
  }

  struct Capture {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
  };
  static Capture capture_of(cudaStream_t stream) {
    Capture capture;
    check(cudaStreamGetCaptureInfo(stream, &capture.status, &capture.id),
          "the capture of a stream");
    return capture;
  }

  OwnedEvent forked_;
  OwnedEvent joined_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace megamoe::cuda
