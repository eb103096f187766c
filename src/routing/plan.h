// The plan of one call: which row of which rank every (token, slot) goes to, and who fetches what.
//
// Rows of a rank are ordered by (expert, source rank, token, slot), never by arrival: this is what
// makes results independent of timing and of R. All of it follows from `counts_RE` (slots per rank
// and expert) and a rank's own ids.
//
// Legend: R ranks, T tokens of a rank, K slots, E experts, e = E/R experts of a rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "megamoe/bf16.h"

namespace megamoe {

/// The group's constants that index arithmetic needs.
struct RoutingDims {
  std::int32_t num_ranks = 1;
  std::int32_t num_experts = 0;
  std::int32_t top_k = 0;

  [[nodiscard]] MEGAMOE_HOST_DEVICE std::int32_t experts_per_rank() const {
    return num_experts / num_ranks;
  }
  [[nodiscard]] MEGAMOE_HOST_DEVICE std::int32_t owner_of(std::int32_t expert) const {
    return expert / experts_per_rank();
  }
  [[nodiscard]] MEGAMOE_HOST_DEVICE std::int32_t first_expert_of(std::int32_t rank) const {
    return rank * experts_per_rank();
  }
};

/// Rows of `expert` over all ranks.
MEGAMOE_HOST_DEVICE inline std::int64_t rows_of_expert(const RoutingDims& dims,
                                                       const std::int32_t* counts_RE,
                                                       std::int32_t expert) {
  std::int64_t num_rows = 0;
  for (std::int32_t rank = 0; rank < dims.num_ranks; ++rank) {
    num_rows += counts_RE[static_cast<std::int64_t>(rank) * dims.num_experts + expert];
  }
  return num_rows;
}

MEGAMOE_HOST_DEVICE constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// Writes the first row of each expert of `rank` and, last, the end of its rows: e + 1 numbers.
/// Every expert starts at a multiple of `row_alignment` (tiles of weight gradients need 64 on the
/// GPU; 1 packs them).
MEGAMOE_HOST_DEVICE inline void expert_offsets(const RoutingDims& dims,
                                               const std::int32_t* counts_RE, std::int32_t rank,
                                               std::int64_t row_alignment, std::int64_t* begin_e) {
  std::int64_t row = 0;
  const std::int32_t first = dims.first_expert_of(rank);
  for (std::int32_t i = 0; i < dims.experts_per_rank(); ++i) {
    begin_e[i] = row;
    row = round_up(row + rows_of_expert(dims, counts_RE, first + i), row_alignment);
  }
  begin_e[dims.experts_per_rank()] = row;
}

/// The row, on its owner, of the first slot that `source` sends to `expert`. `expert_begin` is the
/// expert's first row.
MEGAMOE_HOST_DEVICE inline std::int64_t source_begin(const RoutingDims& dims,
                                                     const std::int32_t* counts_RE,
                                                     std::int32_t source, std::int32_t expert,
                                                     std::int64_t expert_begin) {
  std::int64_t row = expert_begin;
  for (std::int32_t rank = 0; rank < source; ++rank) {
    row += counts_RE[static_cast<std::int64_t>(rank) * dims.num_experts + expert];
  }
  return row;
}

/// One token that a destination fetches, once however many of its experts want it.
struct PullToken {
  std::int32_t token;
  std::int32_t num_slots;
  std::int64_t first_slot;  ///< index into the list's PullSlots
};

/// One of the rows that a fetched token fills.
struct PullSlot {
  std::int64_t row;   ///< at the destination
  std::int32_t slot;  ///< k at the source
  std::int32_t expert;
};

/// What a source publishes: for each destination its tokens, ordered by the first expert that needs
/// them, then by token. The arrays are the caller's (symmetric memory), sized by max_pull_tokens()
/// and T*K.
struct PullLists {
  std::int64_t* destination_begin = nullptr;  ///< [R + 1] into tokens
  PullToken* tokens = nullptr;
  PullSlot* slots = nullptr;
};

/// Most PullTokens that T tokens can need: each goes to at most min(K, R) ranks.
constexpr std::int64_t max_pull_tokens(const RoutingDims& dims, std::int64_t num_tokens) {
  return num_tokens * (dims.top_k < dims.num_ranks ? dims.top_k : dims.num_ranks);
}

/// Where a received row came from: its result goes back to slot `slot` of `token` on `rank`.
struct RowOrigin {
  std::int32_t rank;
  std::int32_t token;
  std::int32_t slot;
};

/// An id that is neither -1 nor an expert. `token` < 0 means that there is none.
struct IdFault {
  std::int64_t token = -1;
  std::int32_t slot = 0;
  std::int32_t value = 0;
  [[nodiscard]] bool found() const { return token >= 0; }
};

/// Counts the slots of each expert into counts_E and returns the first bad id. ids has row stride
/// `id_stride`.
IdFault count_slots(const RoutingDims& dims, const std::int32_t* ids, std::int64_t num_tokens,
                    std::int64_t id_stride, std::int32_t* counts_E);

/// Rows that `rank` receives, without padding.
std::int64_t rows_received(const RoutingDims& dims, const std::int32_t* counts_RE,
                           std::int32_t rank);

/// Reusable memory for building pull lists.
struct PlanScratch {
  std::vector<std::int64_t> next_row_E;
  std::vector<std::int64_t> next_token_E;
  void reserve(const RoutingDims& dims);
};

/// Writes the pull lists of `source`. ids_TK is dense and holds no bad id; row_alignment as in
/// expert_offsets.
void build_pull_lists(const RoutingDims& dims, const std::int32_t* counts_RE, std::int32_t source,
                      std::span<const std::int32_t> ids_TK, std::int64_t row_alignment,
                      PlanScratch& scratch, const PullLists& lists);

}  // namespace megamoe
