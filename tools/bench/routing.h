// Uniform random routing for benchmarks, and what it moves between ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "megamoe/config.h"

namespace megamoe::bench {

/// ids_TK of `rank`: K different experts a token, each set equally likely. Depends on nothing but
/// the arguments.
std::vector<std::int32_t> uniform_ids(const MoeShape& shape, std::int64_t num_tokens, int rank,
                                      std::uint64_t seed);

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

}  // namespace megamoe::bench
