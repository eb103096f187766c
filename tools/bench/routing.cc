#include "bench/routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>

#include "routing/crossing.h"
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

std::mt19937_64 random_of_rank(int rank, std::uint64_t seed) {
  return std::mt19937_64(seed * 1000003 + static_cast<std::uint64_t>(rank));
}

std::vector<std::int32_t> uniform_ids(const MoeShape& shape, std::int64_t num_tokens, int rank,
                                      std::uint64_t seed) {
  std::mt19937_64 random = random_of_rank(rank, seed);
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

/// The odds of each expert under Routing::zipf; equal on all ranks.
std::vector<double> zipf_odds(std::int32_t num_experts, std::uint64_t seed) {
  std::vector<double> odds_E(num_experts);
  for (std::int32_t place = 0; place < num_experts; ++place) odds_E[place] = 1.0 / (place + 1);
  std::mt19937_64 random(seed);
  for (std::size_t i = odds_E.size(); i > 1; --i) std::swap(odds_E[i - 1], odds_E[random() % i]);
  return odds_E;
}

/// Drawing K experts one after the other is taking the K smallest of exponential times at the odds'
/// rates.
std::vector<std::int32_t> zipf_ids(const MoeShape& shape, std::int64_t num_tokens, int rank,
                                   std::uint64_t seed) {
  const std::vector<double> odds_E = zipf_odds(shape.num_experts, seed);
  std::mt19937_64 random = random_of_rank(rank, seed);
  std::vector<std::pair<double, std::int32_t>> times_E(shape.num_experts);
  std::vector<std::int32_t> ids_TK;
  ids_TK.reserve(num_tokens * shape.top_k);
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    for (std::int32_t expert = 0; expert < shape.num_experts; ++expert) {
      const double uniform = (static_cast<double>(random() >> 11) + 1.0) * 0x1p-53;  // in (0, 1]
      times_E[expert] = {-std::log(uniform) / odds_E[expert], expert};
    }
    std::partial_sort(times_E.begin(), times_E.begin() + shape.top_k, times_E.end());
    for (std::int32_t slot = 0; slot < shape.top_k; ++slot) ids_TK.push_back(times_E[slot].second);
  }
  return ids_TK;
}

std::vector<std::int32_t> count_rows(const RoutingDims& dims,
                                     const std::vector<std::vector<std::int32_t>>& ids_RTK) {
  std::vector<std::int32_t> counts_RE(ids_RTK.size() * dims.num_experts);
  for (std::size_t rank = 0; rank < ids_RTK.size(); ++rank) {
    count_slots(dims, ids_RTK[rank].data(),
                static_cast<std::int64_t>(ids_RTK[rank].size()) / dims.top_k, dims.top_k,
                counts_RE.data() + rank * dims.num_experts);
  }
  return counts_RE;
}

}  // namespace

const char* to_string(Routing routing) {
  switch (routing) {
    case Routing::uniform:
      return "uniform";
    case Routing::zipf:
      return "zipf";
    case Routing::one_expert:
      return "one-expert";
  }
  return "unknown";
}

Routing parse_routing(const std::string& text) {
  for (const Routing routing : {Routing::uniform, Routing::zipf, Routing::one_expert}) {
    if (text == to_string(routing)) return routing;
  }
  throw std::invalid_argument("'" + text + "': must be uniform, zipf or one-expert");
}

std::vector<std::vector<std::int32_t>> routing_ids(Routing routing, const MoeShape& shape,
                                                   std::int64_t num_tokens, int num_ranks,
                                                   std::uint64_t seed) {
  std::vector<std::vector<std::int32_t>> ids_RTK;
  for (int rank = 0; rank < num_ranks; ++rank) {
    switch (routing) {
      case Routing::uniform:
        ids_RTK.push_back(uniform_ids(shape, num_tokens, rank, seed));
        break;
      case Routing::zipf:
        ids_RTK.push_back(zipf_ids(shape, num_tokens, rank, seed));
        break;
      case Routing::one_expert:
        ids_RTK.emplace_back(num_tokens * shape.top_k, shape.num_experts - 1);
        break;
    }
  }
  return ids_RTK;
}

BusiestRows count_busiest(const MoeShape& shape,
                          const std::vector<std::vector<std::int32_t>>& ids_RTK) {
  const RoutingDims dims{static_cast<std::int32_t>(ids_RTK.size()), shape.num_experts, shape.top_k};
  const std::vector<std::int32_t> counts_RE = count_rows(dims, ids_RTK);
  std::vector<std::int64_t> rows_E(shape.num_experts);
  for (std::size_t i = 0; i < counts_RE.size(); ++i) rows_E[i % rows_E.size()] += counts_RE[i];
  BusiestRows busiest;
  busiest.of_expert = *std::max_element(rows_E.begin(), rows_E.end());
  const std::int32_t experts_per_rank = dims.experts_per_rank();
  for (int rank = 0; rank < dims.num_ranks; ++rank) {
    const auto first = rows_E.begin() + static_cast<std::ptrdiff_t>(rank) * experts_per_rank;
    const std::int64_t rows = std::accumulate(first, first + experts_per_rank, std::int64_t{0});
    if (rows <= busiest.of_rank) continue;
    busiest.rank = rank;
    busiest.of_rank = rows;
  }
  return busiest;
}

TrafficComparison count_traffic(const MoeShape& shape,
                                const std::vector<std::vector<std::int32_t>>& ids_RTK) {
  const RoutingDims dims{static_cast<std::int32_t>(ids_RTK.size()), shape.num_experts, shape.top_k};
  const std::vector<std::int32_t> counts_RE = count_rows(dims, ids_RTK);
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

Traffic busiest_between_hosts(const MoeShape& shape, const Topology& topology,
                              const std::vector<std::vector<std::int32_t>>& ids_RTK) {
  const HostRouting routing{{topology.num_ranks(), shape.num_experts, shape.top_k},
                            topology.ranks_per_host()};
  const std::int32_t num_hosts = routing.num_hosts();
  const std::vector<std::int32_t> counts_RE = count_rows(routing.dims, ids_RTK);
  std::vector<std::int32_t> tokens_RS(ids_RTK.size() * num_hosts);
  for (std::size_t rank = 0; rank < ids_RTK.size(); ++rank) {
    count_crossing_tokens(routing, ids_RTK[rank], tokens_RS.data() + rank * num_hosts);
  }
  const std::int64_t row_bytes = static_cast<std::int64_t>(sizeof(bf16)) * shape.hidden_dim;
  const auto number_bytes = static_cast<std::int64_t>(sizeof(std::int32_t));
  static_assert(sizeof(std::int32_t) == sizeof(float));
  const auto add_message = [&](Traffic& sum, int from, int from_host, int to, int to_host) {
    const std::int64_t tokens = tokens_RS[from * num_hosts + to_host];
    const std::int64_t slots =
        slots_of_group(routing, from_host, 0,
                       counts_RE.data() + static_cast<std::int64_t>(to) * shape.num_experts);
    const std::int64_t ids = tokens * shape.top_k * number_bytes;
    sum.forward_bytes += ids + (tokens + slots) * row_bytes;
    sum.backward_bytes += 2 * ids + (2 * tokens + slots) * row_bytes + slots * number_bytes;
  };
  Traffic most;
  for (int rank = 0; rank < topology.num_ranks(); ++rank) {
    const int own = topology.host_of(rank);
    Traffic sent;
    Traffic received;
    for (int host = 0; host < num_hosts; ++host) {
      if (host == own) continue;
      const int peer = topology.rank_of(host, topology.local_index_of(rank));
      add_message(sent, rank, own, peer, host);
      add_message(received, peer, host, rank, own);
    }
    for (const Traffic& one : {sent, received}) {
      most.forward_bytes = std::max(most.forward_bytes, one.forward_bytes);
      most.backward_bytes = std::max(most.backward_bytes, one.backward_bytes);
    }
  }
  return most;
}

}  // namespace megamoe::bench
