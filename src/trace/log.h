// What traced kernels leave behind: for each CTA and each of its roles a list of spans. Host and
// device; the layout is the same in builds that do not record, so that what reads it is tested
// there.
//
// Times within a CTA are its SM's clock, read in a few cycles; the CTA's first and last reading of
// the global timer, which takes far longer, tie them to nanoseconds.
#pragma once

#include <cstdint>

namespace megamoe::trace {

/// What a role does in a span.
enum class Event : std::uint8_t {
  main_loop,         ///< math: from the first stage that a tile waits for to its last product
  epilogue,          ///< math: from the last product until its results are in slots
  awaits_turn,       ///< math: the other warpgroup multiplies
  awaits_parts,      ///< math: the other warpgroup still uses the buffers of the epilogue
  skips,             ///< math: a tile of the other CTA of the cluster
  awaits_rows,       ///< load: the tile's rows are still being pulled
  loads,             ///< load: a tile's operands; load of inputs: g, u and weights
  stores,            ///< store: a tile's results to memory
  pushes,            ///< push: a tile's results to where the rows came from
  pulls,             ///< pull: one token's row to all rows that it fills
  awaits_copies,     ///< pull: what is on its way has arrived
  awaits_gradients,  ///< reduce: a peer has not sent all of its gradients
  reduces,           ///< reduce: one token's slots to its row
};
inline constexpr int kNumEvents = 13;

/// Where a role records. Which warp does what depends on the kernel; the events tell.
enum Track : std::int32_t {
  track_warp_0,
  track_warp_1,
  track_warp_2,
  track_warp_3,
  track_math_0,  ///< the first math warpgroup
  track_math_1,
};
inline constexpr int kNumTracks = 6;

struct Record {
  std::uint32_t begin;         ///< clock, low half
  std::uint32_t end;           ///< clock, low half
  std::uint32_t waited;        ///< of that: cycles in waits on barriers
  std::uint32_t first_waited;  ///< main loops: of that, for the first K block
  std::uint16_t group;         ///< expert of the rank
  std::uint16_t num_k_blocks;  ///< of 64; at most 65535
  std::uint8_t num_units;      ///< of 16 rows
  Event event;
  std::uint16_t reserved;
};
static_assert(sizeof(Record) == 24);

/// Enough for a tile's two spans where 256 experts of deepseek-v3's size are on one rank, whose
/// weight gradients have 2,979 tiles for each of 132 CTAs.
inline constexpr std::uint32_t kMaxRecords = 8192;

struct BlockLog {
  std::uint64_t begin_ns;  ///< global timer; 0: the CTA did not run
  std::uint64_t end_ns;
  std::uint32_t begin_clock;
  std::uint32_t end_clock;
  std::uint32_t sm;
  std::uint32_t num_records[kNumTracks];  ///< that the role wanted to write; kMaxRecords are kept
  std::uint32_t reserved;
  Record records[kNumTracks][kMaxRecords];
};

}  // namespace megamoe::trace
