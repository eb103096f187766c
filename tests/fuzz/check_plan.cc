#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "checks.h"
#include "routing/plan.h"

namespace megamoe::fuzz {
namespace {

/// Where a row's token came from. Compared in this order, which is the order of an expert's rows.
using Origin = std::tuple<int, std::int64_t, std::int32_t>;  // source rank, token, slot

struct Routing {
  RoutingDims dims;
  std::vector<std::vector<std::int32_t>> ids_RTK;
  std::vector<std::int32_t> counts_RE;
};

Routing read_routing(ByteReader& input) {
  Routing routing;
  routing.dims.num_ranks = static_cast<std::int32_t>(input.in_range(1, 8));
  routing.dims.num_experts =
      routing.dims.num_ranks * static_cast<std::int32_t>(input.in_range(1, 5));
  routing.dims.top_k = static_cast<std::int32_t>(input.in_range(1, 6));
  for (int rank = 0; rank < routing.dims.num_ranks; ++rank) {
    std::vector<std::int32_t> ids(input.in_range(0, 12) * routing.dims.top_k);
    for (std::int32_t& id : ids) {
      id = static_cast<std::int32_t>(input.in_range(0, routing.dims.num_experts)) - 1;
    }
    routing.ids_RTK.push_back(std::move(ids));
  }
  if (input.byte() < 64) {  // one bad id somewhere, if there is a slot
    std::vector<std::int32_t>& ids = routing.ids_RTK[input.byte() % routing.ids_RTK.size()];
    if (!ids.empty()) ids[input.byte() % ids.size()] = static_cast<std::int32_t>(input.int64());
  }
  return routing;
}

/// Fills the counts; says whether a rank has a bad id.
std::string count_all(Routing& routing, bool& has_fault) {
  const RoutingDims& dims = routing.dims;
  has_fault = false;
  routing.counts_RE.assign(static_cast<std::size_t>(dims.num_ranks) * dims.num_experts, 7);
  for (int rank = 0; rank < dims.num_ranks; ++rank) {
    const std::vector<std::int32_t>& ids = routing.ids_RTK[rank];
    std::int32_t* counts_E = &routing.counts_RE[static_cast<std::size_t>(rank) * dims.num_experts];
    const IdFault fault = count_slots(
        dims, ids.data(), static_cast<std::int64_t>(ids.size()) / dims.top_k, dims.top_k, counts_E);
    const auto bad = std::find_if(
        ids.begin(), ids.end(), [&](std::int32_t id) { return id < -1 || id >= dims.num_experts; });
    if (fault.found() != (bad != ids.end())) return "count_slots missed or invented a bad id";
    if (fault.found()) {
      has_fault = true;
      const std::int64_t index = bad - ids.begin();
      if (fault.value != *bad || fault.token != index / dims.top_k ||
          fault.slot != index % dims.top_k) {
        return "count_slots names another place than the first bad id";
      }
    }
    for (std::int32_t expert = 0; expert < dims.num_experts; ++expert) {
      if (counts_E[expert] != std::count(ids.begin(), ids.end(), expert)) return "wrong count";
    }
  }
  return "";
}

/// Walks the pull lists of one source; enters the rows of each destination into `origins`.
std::string check_pull_lists(const Routing& routing, int source, std::int64_t row_alignment,
                             std::vector<std::map<std::int64_t, Origin>>& origins_R) {
  const RoutingDims& dims = routing.dims;
  const std::vector<std::int32_t>& ids = routing.ids_RTK[source];
  const std::int64_t num_tokens = static_cast<std::int64_t>(ids.size()) / dims.top_k;
  std::vector<std::int64_t> begin(dims.num_ranks + 1, -1);
  std::vector<PullToken> tokens(max_pull_tokens(dims, num_tokens));
  std::vector<PullSlot> slots(ids.size());
  PlanScratch scratch;
  build_pull_lists(dims, routing.counts_RE.data(), source, ids, row_alignment, scratch,
                   {begin.data(), tokens.data(), slots.data()});
  if (begin[0] != 0 || begin.back() > static_cast<std::int64_t>(tokens.size())) {
    return "pull lists do not fit their bound";
  }
  for (int destination = 0; destination < dims.num_ranks; ++destination) {
    std::vector<std::pair<std::int32_t, std::int32_t>> order;  // first expert needed, token
    for (std::int64_t i = begin[destination]; i < begin[destination + 1]; ++i) {
      const PullToken& pull = tokens[i];
      std::int32_t first_expert = dims.num_experts;
      for (std::int32_t s = 0; s < pull.num_slots; ++s) {
        const PullSlot& slot = slots[pull.first_slot + s];
        if (ids[static_cast<std::int64_t>(pull.token) * dims.top_k + slot.slot] != slot.expert) {
          return "a pulled slot names another expert";
        }
        if (dims.owner_of(slot.expert) != destination) return "a slot went to the wrong rank";
        first_expert = std::min(first_expert, slot.expert);
        if (!origins_R[destination]
                 .emplace(slot.row, Origin{source, pull.token, slot.slot})
                 .second) {
          return "two slots share a row";
        }
      }
      order.emplace_back(first_expert, pull.token);
    }
    if (!std::is_sorted(order.begin(), order.end())) return "tokens are not in expert order";
    std::sort(order.begin(), order.end(),
              [](const auto& a, const auto& b) { return a.second < b.second; });
    if (std::adjacent_find(order.begin(), order.end(), [](const auto& a, const auto& b) {
          return a.second == b.second;
        }) != order.end()) {
      return "a token is pulled twice by one rank";
    }
  }
  return "";
}

/// Every expert's rows lie together, in the order of (source, token, slot), with nothing missing.
std::string check_rows(const Routing& routing, int rank, std::int64_t row_alignment,
                       const std::map<std::int64_t, Origin>& origins) {
  const RoutingDims& dims = routing.dims;
  std::vector<std::int64_t> begin(dims.experts_per_rank() + 1);
  expert_offsets(dims, routing.counts_RE.data(), rank, row_alignment, begin.data());
  auto next = origins.begin();
  for (std::int32_t local = 0; local < dims.experts_per_rank(); ++local) {
    if (begin[local] % row_alignment != 0) return "an expert's first row is not aligned";
    const std::int32_t expert = dims.first_expert_of(rank) + local;
    const std::int64_t num_rows = rows_of_expert(dims, routing.counts_RE.data(), expert);
    if (begin[local] + num_rows > begin[local + 1]) return "experts overlap";
    Origin previous{-1, -1, -1};
    for (std::int64_t row = begin[local]; row < begin[local] + num_rows; ++row, ++next) {
      if (next == origins.end() || next->first != row) return "a row is missing or misplaced";
      if (next->second <= previous) return "rows are not ordered by (source, token, slot)";
      previous = next->second;
    }
  }
  if (next != origins.end()) return "a row lies outside its expert";
  const std::int64_t received = rows_received(dims, routing.counts_RE.data(), rank);
  if (received != static_cast<std::int64_t>(origins.size())) return "wrong number of rows";
  return "";
}

}  // namespace

std::string check_plan(ByteReader& input) {
  Routing routing = read_routing(input);
  const std::int64_t row_alignment = std::int64_t{1} << input.in_range(0, 7);
  bool has_fault = false;
  std::string wrong = count_all(routing, has_fault);
  if (!wrong.empty() || has_fault) return wrong;
  std::vector<std::map<std::int64_t, Origin>> origins_R(routing.dims.num_ranks);
  for (int source = 0; source < routing.dims.num_ranks && wrong.empty(); ++source) {
    wrong = check_pull_lists(routing, source, row_alignment, origins_R);
  }
  for (int rank = 0; rank < routing.dims.num_ranks && wrong.empty(); ++rank) {
    wrong = check_rows(routing, rank, row_alignment, origins_R[rank]);
  }
  return wrong;
}

}  // namespace megamoe::fuzz
