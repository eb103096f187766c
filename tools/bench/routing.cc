#include "bench/routing.h"

#include <algorithm>
#include <random>

#include "routing/plan.h"

namespace megamoe::bench {
namespace {

/// What one rank sends to others.
struct Crossings {
  std::int64_t num_tokens = 0;  ///< a token counts once for each rank that needs it
  std::int64_t num_slots = 0;
};

Crossings count_crossings(const RoutingDims& dims, const std::vector<std::int32_t>& counts_RE,
                          int source, const std::vector<std::int32_t>& ids_TK) {
  const auto num_tokens = static_cast<std::int64_t>(ids_TK.size()) / dims.top_k;
  std::vector<std::int64_t> destination_begin(dims.num_ranks + 1);
  std::vector<PullToken> tokens(max_pull_tokens(dims, num_tokens));
  std::vector<PullSlot> slots(ids_TK.size());
  PlanScratch scratch;
  scratch.reserve(dims);
  build_pull_lists(dims, counts_RE.data(), source, ids_TK, 1, scratch,
                   {destination_begin.data(), tokens.data(), slots.data()});
  Crossings crossings;
  for (int destination = 0; destination < dims.num_ranks; ++destination) {
    if (destination == source) continue;
    for (auto i = destination_begin[destination]; i < destination_begin[destination + 1]; ++i) {
      ++crossings.num_tokens;
      crossings.num_slots += tokens[i].num_slots;
    }
  }
  return crossings;
}

/// `num_fetched` rows of each kind go there; results of `num_slots` rows come back.
Traffic traffic(std::int64_t row_bytes, std::int64_t num_fetched, std::int64_t num_slots) {
  const auto list_bytes = static_cast<std::int64_t>(sizeof(PullToken)) * num_fetched +
                          static_cast<std::int64_t>(sizeof(PullSlot)) * num_slots;
  const auto weight_bytes = static_cast<std::int64_t>(sizeof(float)) * num_slots;
  return {.forward_bytes = list_bytes + row_bytes * num_fetched + row_bytes * num_slots,
          .backward_bytes = list_bytes + 2 * row_bytes * num_fetched + weight_bytes +
                            row_bytes * num_slots + weight_bytes};
}

void add(Traffic& sum, const Traffic& term) {
  sum.forward_bytes += term.forward_bytes;
  sum.backward_bytes += term.backward_bytes;
}

}  // namespace

std::vector<std::int32_t> uniform_ids(const MoeShape& shape, std::int64_t num_tokens, int rank,
                                      std::uint64_t seed) {
  std::mt19937_64 random(seed * 1000003 + static_cast<std::uint64_t>(rank));
  std::vector<std::int32_t> experts(shape.num_experts);
  for (std::int32_t expert = 0; expert < shape.num_experts; ++expert) experts[expert] = expert;
  std::vector<std::int32_t> ids_TK;
  ids_TK.reserve(num_tokens * shape.top_k);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    // The first K steps of a shuffle.
    for (std::int32_t slot = 0; slot < shape.top_k; ++slot) {
      const auto other = slot + static_cast<std::int32_t>(random() % (shape.num_experts - slot));
      std::swap(experts[slot], experts[other]);
      ids_TK.push_back(experts[slot]);
    }
  }
  return ids_TK;
}

TrafficComparison count_traffic(const MoeShape& shape,
                                const std::vector<std::vector<std::int32_t>>& ids_RTK) {
  const RoutingDims dims{static_cast<std::int32_t>(ids_RTK.size()), shape.num_experts, shape.top_k};
  std::vector<std::int32_t> counts_RE(ids_RTK.size() * shape.num_experts);
  for (std::size_t rank = 0; rank < ids_RTK.size(); ++rank) {
    count_slots(dims, ids_RTK[rank].data(),
                static_cast<std::int64_t>(ids_RTK[rank].size()) / shape.top_k, shape.top_k,
                counts_RE.data() + rank * shape.num_experts);
  }
  const auto row_bytes = static_cast<std::int64_t>(sizeof(bf16)) * shape.hidden_dim;
  TrafficComparison comparison;
  for (std::size_t rank = 0; rank < ids_RTK.size(); ++rank) {
    const Crossings crossings =
        count_crossings(dims, counts_RE, static_cast<int>(rank), ids_RTK[rank]);
    add(comparison.once, traffic(row_bytes, crossings.num_tokens, crossings.num_slots));
    add(comparison.per_slot, traffic(row_bytes, crossings.num_slots, crossings.num_slots));
  }
  return comparison;
}

}  // namespace megamoe::bench
