// The clock that a device's multiprocessors have run at between two points of a stream. Under load
// a chip lowers it to stay within its power: times of two runs compare only with it in view.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/runtime.h"

namespace megamoe::bench {

class SmClock {
 public:
  /// Of the current device, whose number is `device`.
  explicit SmClock(int device);

  /// A small kernel each: so outside of what is timed.
  void start(cudaStream_t stream) { stamp(0, stream); }
  void end(cudaStream_t stream) { stamp(1, stream); }
  /// Cycles over time, mean over the multiprocessors that both kernels came to; 0 for none. Waits
  /// for the stream.
  [[nodiscard]] double ghz(cudaStream_t stream) const;

 private:
  void stamp(int point, cudaStream_t stream);

  int num_sms_;
  cuda::DeviceMemory stamps_;
};

}  // namespace megamoe::bench
