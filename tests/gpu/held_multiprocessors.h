// A device whose multiprocessors are taken.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "cuda/runtime.h"
#include "gpu/hold_multiprocessors.h"

namespace megamoe::verify {

inline int multiprocessors_of(int device) {
  int count = 0;
  cuda::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "device");
  return count;
}

/// Holds multiprocessors of the current device for a scope.
class HeldMultiprocessors {
 public:
  explicit HeldMultiprocessors(int count) {
    cuda::check(hold_multiprocessors(count, release_.get(), stream_.get()), "holding");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it runs
  }
  HeldMultiprocessors(const HeldMultiprocessors&) = delete;
  HeldMultiprocessors& operator=(const HeldMultiprocessors&) = delete;
  ~HeldMultiprocessors() {
    EXPECT_EQ(cudaStreamQuery(stream_.get()), cudaErrorNotReady) << "nothing was held";
    *const_cast<volatile int*>(release_.get()) = 1;
    cudaStreamSynchronize(stream_.get());
  }

 private:
  cuda::PinnedValue<int> release_;
  cuda::OwnedStream stream_;
};

}  // namespace megamoe::verify
