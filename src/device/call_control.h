// What tells the kernels of one call how the call stands, and what tells the host what went wrong.
#pragma once

#include <cstdint>

namespace megamoe::device {

/// What a rank tells its peers, once a call each.
enum class Signal : std::int32_t {
  entered,         ///< its call header and its counts lie in my memory
  rows_staged,     ///< its rows and pull lists may be read
  gradients_sent,  ///< all that it sends me lies in my slots; it may still read my staged rows
  results_sent     ///< likewise, and it reads nothing of this call any more
};
inline constexpr std::int32_t kNumSignals = 4;

/// A signal's value: twice the epoch of the call, plus one where the sender has failed for good. It
/// only grows.
using SignalValue = std::uint64_t;
constexpr SignalValue kSenderFailed = 1;

enum class FailureCode : std::uint32_t {
  none,
  expert_id_out_of_range,  ///< peer, token, slot, value; need: number of experts
  capacity_exceeded,       ///< peer, need, capacity
  forward_failed,          ///< peer: the forward call that this backward call belongs to
  calls_differ,            ///< peer: it made another call than rank 0
  call_refused,            ///< peer, value: the ErrorCode of what its host found wrong
  deadline_exceeded,       ///< peer, awaited, expected, seen
  peer_failed,             ///< peer, awaited
  rows_late,               ///< value: first row of the block; expected, seen: rows in place
};

/// True where no later call can work either.
constexpr bool is_fatal(FailureCode code) {
  return code == FailureCode::deadline_exceeded || code == FailureCode::peer_failed ||
         code == FailureCode::rows_late;
}

/// The first failure since the host last cleared it; lies in pinned host memory. Each code says
/// which members it fills.
struct FailureRecord {
  std::uint32_t is_set;  ///< written last
  FailureCode code;
  std::int32_t rank;  ///< who noticed
  std::int32_t peer;  ///< whom it is about (may be the rank itself)
  Signal awaited;
  std::int32_t slot;
  std::int32_t value;
  std::uint64_t expected;  ///< epoch, or rows
  std::uint64_t seen;      ///< epoch, or rows
  std::int64_t token;
  std::int64_t need;  ///< rows, or experts
  std::int64_t capacity;
};

/// The products that a call launches.
enum class ProductKind : std::uint8_t { gate_up, down, gate_up_gradient, dx, weight_gradients };
inline constexpr int kNumProductKinds = 5;

/// When the CTAs of a product had done their work, by the global timer. Only grows (the sum modulo
/// 2^64): who measures sets it to zero before a call. Of a product that the call launches once, or
/// side by side, num_ctas * last_ns - sum_ns is the time that CTAs had nothing to do at its end.
struct ProductEnds {
  std::uint64_t sum_ns;
  std::uint64_t last_ns;
  std::uint64_t num_ctas;
};

/// How the current call stands on this rank; device memory, shared by the kernels of all calls in
/// stream order. Epochs count calls from 1. They are advanced by the kernel that enters a call: a
/// kernel argument would repeat itself when a graph is replayed.
struct CallControl {
  std::uint64_t epoch;
  std::uint64_t first_bad_slot;   ///< the lowest index into ids [T, K] that holds a bad id
  std::uint32_t call_failed;      ///< the kernels of this call write no output
  std::uint32_t failed_for_good;  ///< no later call waits or writes output
  /// For measurements: how long loaders of overlapping products have waited for rows, the sum over
  /// their CTAs and all calls; before a CTA's first tile, and before later ones.
  std::uint64_t start_wait_ns;
  std::uint64_t later_wait_ns;
  ProductEnds product_ends[kNumProductKinds];  ///< for measurements
};
inline constexpr std::uint64_t kNoBadSlot = ~std::uint64_t{0};

/// Which call a rank makes; equal on all ranks or the call fails.
struct CallIdentity {
  std::uint64_t kind_and_layer;  ///< the host's: forward or backward, and of which layer
  std::uint64_t forward_epoch;   ///< of the forward call that a backward call belongs to, else 0
};

/// What a rank writes to every peer when it enters a call.
struct CallHeader {
  CallIdentity identity;
  FailureCode failure;
  std::int32_t slot;
  std::int64_t token;
  std::int32_t value;
};

}  // namespace megamoe::device
