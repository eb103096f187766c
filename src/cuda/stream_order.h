// Calls run in the order in which they were enqueued, whatever their streams.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "comm/cuda/host_link.h"
#include "comm/enqueue_order.h"
#include "comm/peer_watch.h"
#include "cuda/runtime.h"
#include "layer/call_context.h"
#include "megamoe/communicator.h"
#include "megamoe/layer.h"

namespace megamoe::cuda {

inline cudaStream_t to_cuda(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

/// The graph that the stream is being captured in. Nothing of CUDA happens when it goes: it is told
/// by a thread of the driver.
inline std::shared_ptr<const CapturingGraph> capturing_graph(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  check(cudaStreamGetCaptureInfo(stream, &status, &id, &graph), "cudaStreamGetCaptureInfo");
  using Shared = std::shared_ptr<CapturingGraph>;
  auto mine = std::make_unique<Shared>(std::make_shared<CapturingGraph>(id));
  const Shared shared = *mine;
  cudaUserObject_t object = nullptr;
  check(cudaUserObjectCreate(
            &object, mine.get(),
            [](void* data) {
              const std::unique_ptr<Shared> its(static_cast<Shared*>(data));
              (*its)->exists = false;
            },
            1, cudaUserObjectNoDestructorSync),
        "cudaUserObjectCreate");
  static_cast<void>(mine.release());  // the object's
  if (const cudaError_t result =
          cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
      result != cudaSuccess) {
    cudaUserObjectRelease(object, 1);
    check(result, "cudaGraphRetainUserObject");
  }
  return shared;
}

/// Within a stream capture nothing is recorded or awaited: who replays graphs orders them.
class StreamOrder {
 public:
  explicit StreamOrder(int device) : StreamOrder(CurrentDevice(device)) {}
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  /// From before a call's first launch until after its last, also where one of them throws. Another
  /// thread's call is enqueued before all of it or after all of it.
  class Turn {
   public:
    Turn(StreamOrder& order, cudaStream_t stream)
        : lock_(order.mutex_), order_(order), stream_(stream), is_captured_(is_capturing(stream)) {
      if (is_captured_ || !order.has_call_) return;
      // On the stream of the last call, too: a handle does not tell that it is the same stream
      // (destroyed ones are handed out again, cudaStreamPerThread is another one on each thread).
      check(cudaStreamWaitEvent(stream, order.last_call_.get(), 0), "cudaStreamWaitEvent");
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() {
      if (is_captured_) return;
      if (cudaEventRecord(order_.last_call_.get(), stream_) == cudaSuccess) order_.has_call_ = true;
    }
    [[nodiscard]] bool is_captured() const { return is_captured_; }

   private:
    std::lock_guard<std::mutex> lock_;
    StreamOrder& order_;
    cudaStream_t stream_;
    bool is_captured_;
  };

  /// Whether everything that was enqueued is done. Throws where it failed.
  bool is_done() {
    const std::lock_guard lock(mutex_);
    if (!has_call_) return true;
    const cudaError_t status = cudaEventQuery(last_call_.get());
    if (status == cudaErrorNotReady) return false;
    check(status, "the calls before");
    return true;
  }
  /// Waits for it. Nobody enqueues meanwhile.
  void synchronize() {
    if (has_call_) cudaEventSynchronize(last_call_.get());
  }

 private:
  explicit StreamOrder(const CurrentDevice& /*device*/) {}

  std::mutex mutex_;
  OwnedEvent last_call_;
  bool has_call_ = false;
};

/// What all calls of a rank have in common, on whatever workspaces. The device is current.
struct RankCalls {
  /// `group` must outlive them, or the watch's stop().
  RankCalls(int device, const Communicator& group)
      : order(device), has_left_R(group.size()), watch(group, has_left_R.get()) {}
  StreamOrder order;
  HostWords has_left_R;                 ///< not 0: kernels that wait for the rank give up
  std::atomic<bool> has_failed{false};  ///< for good: peers may be gone without a farewell
  PeerWatch watch;
  std::shared_ptr<EnqueueOrder> shared;  ///< of all ranks, where they share the device
  std::uint64_t num_calls = 0;           ///< enqueued, refused ones too, captured ones not
};

/// A communicator whose calls have one order: a rank's calls then meet its peers' in the order in
/// which they were enqueued.
class OrderedCommunicator : public Communicator {
 public:
  [[nodiscard]] virtual std::shared_ptr<RankCalls> calls() const = 0;
  [[nodiscard]] virtual HostConnection hosts() const { return {}; }
};

}  // namespace megamoe::cuda
