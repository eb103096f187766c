// Routing for benchmarks: how evenly it loads experts and ranks, and what it moves between ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megamoe/config.h"
#include "megamoe/topology.h"

namespace megamoe::bench {

enum class Routing {
  uniform,  ///< K different experts a token, each set equally likely
  /// K different experts a token, drawn one after the other with odds 1, 1/2, 1/3, ...; the seed
  /// says which expert has which odds
  zipf,
  one_expert,  ///< every slot of every token names the last expert, as verify's
};
const char* to_string(Routing routing);
/// Throws std::invalid_argument with a message for the user.
Routing parse_routing(const std::string& text);

/// ids_TK of each rank, `num_tokens` tokens each. Depends on nothing but the arguments.
std::vector<std::vector<std::int32_t>> routing_ids(Routing routing, const MoeShape& shape,
                                                   std::int64_t num_tokens, int num_ranks,
                                                   std::uint64_t seed);

/// The rank that receives most rows, the first of several, and how many; and the expert's that
/// does.
struct BusiestRows {
  int rank = 0;
  std::int64_t of_rank = 0;
  std::int64_t of_expert = 0;
};
BusiestRows count_busiest(const MoeShape& shape,
                          const std::vector<std::vector<std::int32_t>>& ids_RTK);

/// Bytes that cross from one rank to another, summed over ranks.
struct Traffic {
  std::int64_t forward_bytes = 0;
  std::int64_t backward_bytes = 0;
};

/// `once`: each token crosses once to a rank, however many of its experts live there, as the plan's
/// pull lists have it. `per_slot`: a copy for each slot, as if there were no such rule.
struct TrafficComparison {
  Traffic once;
  Traffic per_slot;
};

/// `ids_RTK` holds each rank's ids. Forward moves x rows there and o rows back; backward x and dy
/// rows and weights there, dx rows and dw back. Results come back a row a slot in either case. The
/// pull lists themselves are counted.
TrafficComparison count_traffic(const MoeShape& shape,
                                const std::vector<std::vector<std::int32_t>>& ids_RTK);

/// What a rank sends to the ranks with its index on other hosts, or receives from them: of the rank
/// and the direction with most bytes. Tokens cross once a host, with their ids; results of the
/// peer's slots go back.
Traffic busiest_between_hosts(const MoeShape& shape, const Topology& topology,
                              const std::vector<std::vector<std::int32_t>>& ids_RTK);

}  // namespace megamoe::bench
