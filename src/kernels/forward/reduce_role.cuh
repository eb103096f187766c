// The reduction of dx beside the weight gradients: a warp an SM takes tokens from one counter and
// sums their slots, which come to shared memory by bulk copies, 512 bytes of up to eight slots at a
// time, while the eight before are summed.
//
// It waits for nobody: it begins when all peers have announced their gradients, takes no token any
// more once its CTA has loaded its last tile, and what it leaves is reduced by a kernel of its own.
// So a rank whose peer comes late (or shares its SMs) loses nothing but the overlap.
#pragma once

#include <cstdint>

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/rank_signals.cuh"
#include "device/row_copy.cuh"
#include "device/trace.cuh"
#include "kernels/forward/reduce_targets.h"
#include "kernels/rank_view.h"
#include "kernels/reduce/slot_sum.cuh"

namespace megamoe::gpu {

inline constexpr int kReduceSlots = 8;
inline constexpr std::uint32_t kReducePartBytes = device::kWarpSize * sizeof(Vector);
inline constexpr int kReduceBuffers = 2;
inline constexpr std::uint32_t kReduceBufferBytes = kReduceSlots * kReducePartBytes;

struct ReduceShared {
  std::uint64_t slots_arrived[kReduceBuffers];
  /// The CTA's load role has issued its last load. A hint that nothing orders: atomics alone.
  std::uint32_t loads_done;
};

/// One thread; a CTA barrier follows.
__device__ inline void init_reduce_barriers(ReduceShared& shared) {
  for (std::uint64_t& arrived : shared.slots_arrived) {
    device::init_barrier(device::shared_address(&arrived), 1);
  }
  shared.loads_done = 0;
}

/// The parts of one token, as the warp walks them: 512 bytes of eight filled slots, then of the
/// next eight, then the next 512 bytes. Lane i < K stands for slot i.
class TokenParts {
 public:
  __device__ TokenParts(const RankView& view, const ReduceTargets& targets, std::int32_t token)
      : hidden_bytes_(static_cast<std::uint32_t>(view.dims.hidden_dim * sizeof(bf16))) {
    const int lane = device::lane_idx();
    const int top_k = view.routing().top_k;
    const std::int64_t slot_idx = static_cast<std::int64_t>(token) * top_k + lane;
    const bool is_slot = lane < top_k;
    is_filled_ = is_slot && targets.ids_TK[slot_idx] >= 0;
    const std::uint32_t filled = __ballot_sync(0xffffffffU, is_filled_);
    number_ = __popc(filled & ((1U << lane) - 1U));
    num_filled_ = __popc(filled);
    std::byte* own = view.symmetric_R[view.rank];
    row_ = reinterpret_cast<const std::byte*>(view.symmetric.exchange.slot_rows_TKH.in(own) +
                                              slot_idx * view.dims.hidden_dim);
    if (is_slot) {
      targets.dweights_TK.data[token * targets.dweights_TK.stride + lane] =
          is_filled_ ? view.symmetric.exchange.slot_dweights_TK.in(own)[slot_idx] : 0.0F;
    }
  }

  [[nodiscard]] __device__ bool is_end() const { return offset_ >= hidden_bytes_; }
  [[nodiscard]] __device__ std::uint32_t num_bytes() const {
    return min(kReducePartBytes, hidden_bytes_ - offset_);
  }
  [[nodiscard]] __device__ int num_slots() const { return min(kReduceSlots, num_filled_ - first_); }
  [[nodiscard]] __device__ bool ends_sum() const { return first_ + kReduceSlots >= num_filled_; }
  [[nodiscard]] __device__ std::uint32_t offset() const { return offset_; }
  __device__ void advance() {
    if (ends_sum()) {
      first_ = 0;
      offset_ += kReducePartBytes;
    } else {
      first_ += kReduceSlots;
    }
  }

  /// Begins to load the part into `buffer`.
  __device__ void load(std::uint32_t buffer, std::uint32_t arrived) const {
    if (device::lane_idx() == 0) {
      device::arrive_expecting(arrived, static_cast<std::uint32_t>(num_slots()) * num_bytes());
    }
    __syncwarp();
    const int place = number_ - first_;
    if (is_filled_ && place >= 0 && place < kReduceSlots) {
      device::load_passing_bytes(buffer + place * kReducePartBytes, row_ + offset_, num_bytes(),
                                 arrived);
    }
  }

 private:
  std::uint32_t hidden_bytes_;
  bool is_filled_;
  int number_;  ///< of this lane's slot among the filled ones
  int num_filled_;
  const std::byte* row_;  ///< of this lane's slot
  std::uint32_t offset_ = 0;
  int first_ = 0;  ///< number of the part's first slot
};

class ReduceRing {
 public:
  /// The buffers may be shared memory that the copy engine has used before.
  __device__ ReduceRing(std::byte* buffers, ReduceShared& shared, trace::Recorder& recorder)
      : buffers_(device::shared_address(buffers)),
        arrived_(device::shared_address(shared.slots_arrived)),
        recorder_(recorder) {}

  __device__ void reduce_token(const RankView& view, const ReduceTargets& targets,
                               std::int32_t token) {
    TokenParts parts(view, targets, token);
    TokenParts ahead = parts;
    Vector* out = row_of(targets.dx_TH.data, token, targets.dx_TH.stride) + device::lane_idx();
    SlotSum sum;
    load(ahead);
    for (; !parts.is_end(); parts.advance()) {
      if (!ahead.is_end()) load(ahead);
      add(parts, sum);
      if (!parts.ends_sum()) continue;
      if (device::lane_idx() * sizeof(Vector) < parts.num_bytes()) {
        out[parts.offset() / sizeof(Vector)] = sum.rounded();
      }
      sum = {};
    }
  }

 private:
  __device__ void load(TokenParts& parts) {
    parts.load(buffers_ + load_.slot * kReduceBufferBytes, arrived_ + load_.slot * 8U);
    load_.advance();
    parts.advance();
  }
  __device__ void add(const TokenParts& parts, SlotSum& sum) {
    recorder_.wait(arrived_ + use_.slot * 8U, use_.parity);
    const std::uint32_t buffer = buffers_ + use_.slot * kReduceBufferBytes +
                                 device::lane_idx() * static_cast<std::uint32_t>(sizeof(Vector));
    for (int place = 0; place < parts.num_slots(); ++place) {
      sum.add(device::load_shared_vector(buffer + place * kReducePartBytes), 1.0F);
    }
    // The copy engine may fill the buffer again.
    device::fence_async_shared();
    __syncwarp();
    use_.advance();
  }

  std::uint32_t buffers_;
  std::uint32_t arrived_;
  trace::Recorder& recorder_;
  device::RingPosition<kReduceBuffers> load_;
  device::RingPosition<kReduceBuffers> use_;
};

__device__ inline void note_loads_done(ReduceShared& shared) {
  atomicExch_block(&shared.loads_done, 1U);
}

__device__ inline bool are_loads_done(ReduceShared& shared) {
  return atomicOr_block(&shared.loads_done, 0U) != 0;
}

/// True once all ranks have sent their gradients; false where the CTA's work is over before.
__device__ inline bool gradients_arrive(const RankView& view, ReduceShared& shared,
                                        trace::Recorder& recorder) {
  const trace::Span span(recorder, trace::Event::awaits_gradients);
  constexpr unsigned kPauseNs = 1000;
  const std::uint64_t epoch = view.control()->epoch;
  for (;;) {
    bool all = true;
    for (int peer = device::lane_idx(); peer < view.routing().num_ranks;
         peer += device::kWarpSize) {
      const device::SignalValue seen =
          device::load_acquire_sys(view.signal(device::Signal::gradients_sent, view.rank, peer));
      all = all && device::epoch_of(seen) >= epoch && (seen & device::kSenderFailed) == 0;
    }
    const bool all_have = __all_sync(0xffffffffU, all);
    if (all_have) {
      __syncwarp();  // what one lane has acquired, the others read
      return true;
    }
    const bool is_over = device::lane_idx() == 0 && are_loads_done(shared);
    if (__any_sync(0xffffffffU, is_over)) return false;
    __nanosleep(kPauseNs);
  }
}

/// One warp a CTA; `buffers` has kReduceBuffers * kReduceBufferBytes.
__device__ inline void reduce_role(const RankView& view, const ReduceTargets& targets,
                                   std::byte* buffers, ReduceShared& shared,
                                   trace::Recorder& recorder) {
  if (targets.num_tokens == 0) return;
  if (view.control()->call_failed != 0 || !gradients_arrive(view, shared, recorder)) return;
  device::fence_async_global();  // what peers stored, the copy engine reads
  std::uint32_t* num_reduced = view.scratch_layout.num_reduced.in(view.scratch);
  ReduceRing ring(buffers, shared, recorder);
  const auto take = [&] {
    std::uint32_t token = static_cast<std::uint32_t>(targets.num_tokens);
    if (device::lane_idx() == 0 && !are_loads_done(shared)) token = atomicAdd(num_reduced, 1U);
    return token;
  };
  std::uint32_t taken = take();
  for (;;) {
    const std::uint32_t token = __shfl_sync(0xffffffffU, taken, 0);
    if (token >= static_cast<std::uint32_t>(targets.num_tokens)) return;
    taken = take();
    const trace::Span span(recorder, trace::Event::reduces);
    ring.reduce_token(view, targets, static_cast<std::int32_t>(token));
  }
}

}  // namespace megamoe::gpu
