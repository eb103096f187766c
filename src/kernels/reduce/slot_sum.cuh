// The sum over a token's slots: eight columns a thread, slots in their order, fp32 fma from 0,
// rounded once.
#pragma once

#include "device/matrix_store.cuh"
#include "kernels/exchange/rows.cuh"

namespace megamoe::gpu {

class SlotSum {
 public:
  __device__ void add(const Vector& values, float weight) {
    add_pair(values.x, weight, sums_[0], sums_[1]);
    add_pair(values.y, weight, sums_[2], sums_[3]);
    add_pair(values.z, weight, sums_[4], sums_[5]);
    add_pair(values.w, weight, sums_[6], sums_[7]);
  }
  [[nodiscard]] __device__ Vector rounded() const {
    return {device::pack_bf16(sums_[0], sums_[1]), device::pack_bf16(sums_[2], sums_[3]),
            device::pack_bf16(sums_[4], sums_[5]), device::pack_bf16(sums_[6], sums_[7])};
  }

 private:
  static __device__ void add_pair(std::uint32_t pair, float weight, float& first, float& second) {
    first = __fmaf_rn(weight, device::first_of(pair), first);
    second = __fmaf_rn(weight, device::second_of(pair), second);
  }

  float sums_[kVectorElements] = {};
};

}  // namespace megamoe::gpu
