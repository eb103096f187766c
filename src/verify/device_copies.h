// Copies of host tensors on a CUDA device, for running a layer of Backend::cuda on a problem that
// lies in host memory.
#pragma once

#include <memory>

#include "megamoe/layer.h"
#include "megamoe/topology.h"

namespace megamoe::verify {

/// The device of rank `rank`: one each where there are enough, else all ranks share the first.
int cuda_device_of(int rank, int num_ranks);
/// The device of a rank that a launcher started as a process: those of a host have its devices.
inline int cuda_device_of(const Topology& launched, int rank) {
  return cuda_device_of(launched.local_index_of(rank), launched.ranks_per_host());
}

/// Device memory and a stream of one rank. Freed and allocated in stream order, so that no call of
/// a peer on the same device is waited for. Throws Error; unsupported without CUDA in the build.
class DeviceCopies {
 public:
  explicit DeviceCopies(int device);
  ~DeviceCopies();

  /// The same tensor on the device, with the same strides. A copy made for the same host tensor
  /// before is overwritten. Absent tensors stay absent.
  ConstTensorView upload(const ConstTensorView& host);
  TensorView upload(const TensorView& host);
  /// Copies what upload() made for it back, after all that the stream holds.
  void download(const TensorView& host);
  [[nodiscard]] Stream stream() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace megamoe::verify
