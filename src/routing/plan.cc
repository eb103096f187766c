#include "routing/plan.h"

#include <algorithm>

namespace megamoe {
namespace {

bool is_first_slot_of_destination(const RoutingDims& dims, const std::int32_t* ids_K,
                                  std::int32_t slot) {
  const std::int32_t owner = dims.owner_of(ids_K[slot]);
  for (std::int32_t earlier = 0; earlier < slot; ++earlier) {
    if (ids_K[earlier] >= 0 && dims.owner_of(ids_K[earlier]) == owner) return false;
  }
  return true;
}

/// The lowest expert of the slot's destination that the token names: its place in the destination's
/// order.
std::int32_t first_expert_needed(const RoutingDims& dims, const std::int32_t* ids_K,
                                 std::int32_t slot) {
  const std::int32_t owner = dims.owner_of(ids_K[slot]);
  std::int32_t first = ids_K[slot];
  for (std::int32_t other = 0; other < dims.top_k; ++other) {
    const std::int32_t expert = ids_K[other];
    if (expert >= 0 && dims.owner_of(expert) == owner) first = std::min(first, expert);
  }
  return first;
}

/// Calls visit(token, slot) once for each (token, destination), tokens in order.
template <class Visit>
void for_each_pull(const RoutingDims& dims, std::span<const std::int32_t> ids_TK, Visit visit) {
  const std::int64_t num_tokens = static_cast<std::int64_t>(ids_TK.size()) / dims.top_k;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const std::int32_t* ids_K = ids_TK.data() + token * dims.top_k;
    for (std::int32_t slot = 0; slot < dims.top_k; ++slot) {
      if (ids_K[slot] >= 0 && is_first_slot_of_destination(dims, ids_K, slot)) visit(token, slot);
    }
  }
}

/// Where each expert's group of tokens starts in the list; fills destination_begin from it.
void place_groups(const RoutingDims& dims, std::vector<std::int64_t>& group_E,
                  std::int64_t* destination_begin) {
  std::int64_t next = 0;
  for (std::int32_t expert = 0; expert < dims.num_experts; ++expert) {
    if (expert % dims.experts_per_rank() == 0) destination_begin[dims.owner_of(expert)] = next;
    const std::int64_t size = group_E[expert];
    group_E[expert] = next;
    next += size;
  }
  destination_begin[dims.num_ranks] = next;
}

}  // namespace

void PlanScratch::reserve(const RoutingDims& dims) {
  next_row_E.reserve(dims.num_experts);
  next_token_E.reserve(dims.num_experts);
}

IdFault count_slots(const RoutingDims& dims, const std::int32_t* ids, std::int64_t num_tokens,
                    std::int64_t id_stride, std::int32_t* counts_E) {
  std::fill(counts_E, counts_E + dims.num_experts, 0);
  IdFault fault;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (std::int32_t slot = 0; slot < dims.top_k; ++slot) {
      const std::int32_t id = ids[token * id_stride + slot];
      if (id >= 0 && id < dims.num_experts) {
        ++counts_E[id];
      } else if (id != -1 && !fault.found()) {
        fault = {token, slot, id};
      }
    }
  }
  return fault;
}

std::int64_t rows_received(const RoutingDims& dims, const std::int32_t* counts_RE,
                           std::int32_t rank) {
  std::int64_t num_rows = 0;
  const std::int32_t first = dims.first_expert_of(rank);
  for (std::int32_t i = 0; i < dims.experts_per_rank(); ++i) {
    num_rows += rows_of_expert(dims, counts_RE, first + i);
  }
  return num_rows;
}

void build_pull_lists(const RoutingDims& dims, const std::int32_t* counts_RE, std::int32_t source,
                      std::span<const std::int32_t> ids_TK, std::int64_t row_alignment,
                      PlanScratch& scratch, const PullLists& lists) {
  // The next free row of this source at every expert.
  std::vector<std::int64_t>& next_row_E = scratch.next_row_E;
  next_row_E.resize(dims.num_experts);
  std::int64_t expert_begin = 0;
  for (std::int32_t expert = 0; expert < dims.num_experts; ++expert) {
    if (expert % dims.experts_per_rank() == 0) expert_begin = 0;
    next_row_E[expert] = source_begin(dims, counts_RE, source, expert, expert_begin);
    expert_begin = round_up(expert_begin + rows_of_expert(dims, counts_RE, expert), row_alignment);
  }

  // A counting sort of (token, destination) pairs by the first expert that needs the token.
  std::vector<std::int64_t>& next_token_E = scratch.next_token_E;
  next_token_E.assign(dims.num_experts, 0);
  for_each_pull(dims, ids_TK, [&](std::int64_t token, std::int32_t slot) {
    ++next_token_E[first_expert_needed(dims, ids_TK.data() + token * dims.top_k, slot)];
  });
  place_groups(dims, next_token_E, lists.destination_begin);

  // Tokens are visited in order, so rows of an expert come out ordered by (token, slot).
  std::int64_t num_slots = 0;
  for_each_pull(dims, ids_TK, [&](std::int64_t token, std::int32_t first_slot) {
    const std::int32_t* ids_K = ids_TK.data() + token * dims.top_k;
    const std::int32_t owner = dims.owner_of(ids_K[first_slot]);
    PullToken& pull = lists.tokens[next_token_E[first_expert_needed(dims, ids_K, first_slot)]++];
    pull = {static_cast<std::int32_t>(token), 0, num_slots};
    for (std::int32_t slot = first_slot; slot < dims.top_k; ++slot) {
      const std::int32_t expert = ids_K[slot];
      if (expert < 0 || dims.owner_of(expert) != owner) continue;
      lists.slots[num_slots++] = {next_row_E[expert]++, slot, expert};
      ++pull.num_slots;
    }
  });
}

}  // namespace megamoe
