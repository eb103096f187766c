// Which cluster computes which tile. A ticket is a tile's number in the order of the product's
// walk. Clusters take tickets from one counter, so that one which was slowed down, or started late,
// takes fewer; where there is no counter, each takes every n-th of n clusters. No value depends on
// it.
//
// The load warp of a cluster's first CTA deals: it asks for a ticket while it loads the tile
// before, and writes it to a ring in both CTAs. Every role of both reads every ticket, in order, up
// to the first beyond the last tile. A role may read a ticket while it is at work on the tile
// before; nobody waits for more than that.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/cluster_memory.cuh"
#include "kernels/products/ticket_ring.h"

namespace megamoe::products {

/// By one thread; a cluster barrier must follow before use.
__device__ inline void init_ticket_barriers(TicketRing& ring, std::uint32_t num_readers) {
  for (int slot = 0; slot < kTicketSlots; ++slot) {
    device::init_barrier(device::shared_address(&ring.dealt[slot]), 1);
    device::init_barrier(device::shared_address(&ring.read_by_all[slot]), num_readers);
  }
}

/// A place in the ring, in the one register that producers have for it.
class TicketPosition {
 public:
  __device__ std::uint32_t slot() const { return passed_ % kTicketSlots; }
  __device__ std::uint32_t parity() const { return passed_ / kTicketSlots & 1U; }
  __device__ void advance() { ++passed_; }

 private:
  std::uint32_t passed_ = 0;
};

/// Who reads: one thread, or a warp in step.
enum class Readers { thread, warp };

template <Readers kReaders>
class TicketReader {
 public:
  __device__ explicit TicketReader(TicketRing& ring) : ring_(device::shared_address(&ring)) {}

  /// The next ticket. It must be handed back, unless it is the last.
  __device__ std::uint32_t read() {
    device::wait(ring_ + offsetof(TicketRing, dealt) + at_.slot() * 8U, at_.parity());
    const std::uint32_t ticket =
        device::load_shared_word(ring_ + offsetof(TicketRing, tickets) + at_.slot() * 4U);
    // So that the compiler knows it to be the same in all lanes: else a whole tile counts as
    // divergent code, whose addresses it cannot keep in uniform registers.
    return kReaders == Readers::warp ? __shfl_sync(0xffffffffU, ticket, 0) : ticket;
  }
  /// Follows a branch on what was read: the read is over.
  __device__ void hand_back() {
    if constexpr (kReaders == Readers::warp) __syncwarp();
    if (kReaders == Readers::thread || device::lane_idx() == 0) {
      device::arrive_reads_over(
          device::cluster_address(ring_ + offsetof(TicketRing, read_by_all) + at_.slot() * 8U, 0));
    }
    at_.advance();
  }
  [[nodiscard]] __device__ const TicketPosition& at() const { return at_; }

 private:
  std::uint32_t ring_;
  TicketPosition at_;
};

/// The load role's: in a cluster's first CTA it deals what it reads.
class TicketDealer {
 public:
  /// `num_taken`: the counter, or null.
  __device__ TicketDealer(TicketRing& ring, std::uint32_t* num_taken)
      : reader_(ring),
        ring_(device::shared_address(&ring)),
        num_taken_(num_taken),
        deals_(device::cluster_cta_rank() == 0),
        asked_for_(blockIdx.x / kClusterSize) {
    if (deals_ && num_taken_ != nullptr) ask();
  }

  __device__ std::uint32_t read() {
    if (deals_) deal();
    return reader_.read();
  }
  __device__ void hand_back() { reader_.hand_back(); }

 private:
  __device__ void deal() {
    const TicketPosition& at = reader_.at();
    device::wait(ring_ + offsetof(TicketRing, read_by_all) + at.slot() * 8U, at.parity() ^ 1U);
    for (std::uint32_t cta = 0; cta < kClusterSize; ++cta) {
      const std::uint32_t ring = device::cluster_address(ring_, cta);
      const std::uint32_t dealt = ring + offsetof(TicketRing, dealt) + at.slot() * 8U;
      device::arrive_expecting_in_cluster(dealt, sizeof(std::uint32_t));
      device::send_cluster_word(ring + offsetof(TicketRing, tickets) + at.slot() * 4U, asked_for_,
                                dealt);
    }
    ask();
  }
  /// The counter's answer is waited for where it is dealt, a tile later.
  __device__ void ask() {
    if (num_taken_ != nullptr) {
      asked_for_ = atomicAdd(num_taken_, 1U);
    } else {
      asked_for_ += gridDim.x / kClusterSize;
    }
  }

  TicketReader<Readers::thread> reader_;
  std::uint32_t ring_;
  std::uint32_t* num_taken_;
  bool deals_;
  std::uint32_t asked_for_;
};

}  // namespace megamoe::products
