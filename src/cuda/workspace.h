// What the CUDA backend keeps in a workspace: row buffers and scratch on the device, the failure
// record, the order of calls.
#pragma once

#include <memory>
#include <optional>

#include "cuda/runtime.h"
#include "cuda/side_stream.h"
#include "cuda/stage_clock.h"
#include "cuda/stream_order.h"
#include "device/call_control.h"
#include "layer/workspace.h"
#include "trace/region.h"

namespace megamoe::cuda {

class CudaWorkspace final : public WorkspaceMemory {
 public:
  /// Loads all kernels, so that no later launch has to: a launch that loads code may wait for
  /// kernels that run, also for one of a peer on the same device that waits for this rank. Throws
  /// Error.
  CudaWorkspace(const LayerConfig& config, Workspace::Impl& workspace);
  /// Waits for the calls that were enqueued.
  ~CudaWorkspace() override;
  void poison() override;
  /// Throw Error where a call cannot run on `stream`: it is of another device, or the side stream
  /// is part of another capture. The device of a stream that is being captured is not known.
  void check_device(cudaStream_t stream) const;
  void check_fork(cudaStream_t stream) const;

  int device;
  DeviceMemory local;
  PinnedValue<device::FailureRecord> failure;
  /// On several hosts: of what runs beside the caller's stream. A record has one writer at a time.
  /// Null on one host.
  std::unique_ptr<PinnedValue<device::FailureRecord>> network_failure;
  std::shared_ptr<RankCalls> calls;  ///< of the communicator
  SideStream side;                   ///< of what is small, and awaited
  SideStream gradients_side;         ///< of weight gradients beside dx
  StageClock stages;
  StageClock network_stages;         ///< on several hosts: of the stream beside the caller's
  trace::Launches* trace = nullptr;  ///< builds with MEGAMOE_TRACE: where products are recorded
  std::optional<Error> given_up;     ///< a call that the host could not enqueue to its end

 private:
  Workspace::Impl& workspace_;
  std::int64_t scratch_offset_;  ///< of what poison() may overwrite in the scratch
  std::int64_t exchange_offset_;
};

}  // namespace megamoe::cuda
