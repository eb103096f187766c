#include "schedule/call_plan.h"

#include <algorithm>

#include "schedule/pull_order.h"
#include "schedule/row_blocks.h"

namespace megamoe::checker {
namespace {

/// The lists of one source.
struct Lists {
  std::vector<std::int64_t> begin;
  std::vector<PullToken> tokens;
  std::vector<PullSlot> slots;
};

Lists lists_of(const RoutingDims& dims, const std::vector<std::int32_t>& counts_RE,
               const CallSpec& call, std::int32_t source) {
  const std::vector<std::int32_t>& ids = call.ids[source];
  const auto num_tokens = static_cast<std::int64_t>(ids.size()) / dims.top_k;
  Lists lists;
  lists.begin.resize(dims.num_ranks + 1);
  lists.tokens.resize(max_pull_tokens(dims, num_tokens));
  lists.slots.resize(ids.size());
  PlanScratch scratch;
  build_pull_lists(dims, counts_RE.data(), source, ids, schedule::kGroupAlignment, scratch,
                   {lists.begin.data(), lists.tokens.data(), lists.slots.data()});
  return lists;
}

/// Where the tokens of each source begin that need each expert of the rank first.
std::vector<std::vector<int>> first_pulls(const RoutingDims& dims, const std::vector<Lists>& lists,
                                          std::int32_t rank) {
  std::vector<std::vector<int>> begins;
  for (const Lists& of_source : lists) {
    std::vector<int> count(dims.experts_per_rank() + 1, 0);
    for (std::int64_t i = of_source.begin[rank]; i < of_source.begin[rank + 1]; ++i) {
      const PullToken& pull = of_source.tokens[i];
      std::int32_t first = dims.num_experts;
      for (std::int32_t slot = 0; slot < pull.num_slots; ++slot) {
        first = std::min(first, of_source.slots[pull.first_slot + slot].expert);
      }
      ++count[first - dims.first_expert_of(rank)];
    }
    std::vector<int> begin = {static_cast<int>(of_source.begin[rank])};
    for (std::int32_t i = 0; i < dims.experts_per_rank(); ++i) {
      begin.push_back(begin.back() + count[i]);
    }
    begins.push_back(begin);
  }
  return begins;
}

void place_rows(const RoutingDims& dims, const std::vector<Lists>& lists, std::int32_t rank,
                RankPlan& plan) {
  const std::vector<std::vector<int>> begins = first_pulls(dims, lists, rank);
  const auto begin = [&](int source, int expert) { return begins[source][expert]; };
  const schedule::PullOrder order(dims.num_ranks, rank, dims.experts_per_rank(), begin);
  plan.pulls.resize(order.num_tokens());
  for (std::int32_t source = 0; source < dims.num_ranks; ++source) {
    for (int i = 0; i < order.num_tokens_of(source); ++i) {
      const PullToken& token = lists[source].tokens[lists[source].begin[rank] + i];
      Pull& pull = plan.pulls[order.place_of(source, i)];
      pull.source = static_cast<std::uint32_t>(source);
      pull.token = static_cast<std::uint32_t>(token.token);
      for (std::int32_t j = 0; j < token.num_slots; ++j) {
        const PullSlot& slot = lists[source].slots[token.first_slot + j];
        pull.rows.push_back(static_cast<std::uint32_t>(slot.row));
        plan.origin_C[slot.row] = {source, token.token, slot.slot};
      }
    }
  }
}

}  // namespace

CallPlan make_call_plan(const RoutingDims& dims, const CallSpec& call) {
  CallPlan plan;
  std::vector<std::int32_t> counts_RE(static_cast<std::size_t>(dims.num_ranks) * dims.num_experts);
  for (std::int32_t rank = 0; rank < dims.num_ranks; ++rank) {
    const auto num_tokens = static_cast<std::int64_t>(call.ids[rank].size()) / dims.top_k;
    plan.num_tokens_R.push_back(static_cast<std::uint32_t>(num_tokens));
    count_slots(dims, call.ids[rank].data(), num_tokens, dims.top_k,
                counts_RE.data() + static_cast<std::ptrdiff_t>(rank) * dims.num_experts);
  }
  std::vector<Lists> lists;
  for (std::int32_t rank = 0; rank < dims.num_ranks; ++rank) {
    lists.push_back(lists_of(dims, counts_RE, call, rank));
  }
  plan.rank.resize(dims.num_ranks);
  std::vector<std::int64_t> begin_e(dims.experts_per_rank() + 1);
  for (std::int32_t rank = 0; rank < dims.num_ranks; ++rank) {
    RankPlan& of_rank = plan.rank[rank];
    expert_offsets(dims, counts_RE.data(), rank, schedule::kGroupAlignment, begin_e.data());
    of_rank.begin_e.assign(begin_e.begin(), begin_e.end());
    for (std::int32_t i = 0; i < dims.experts_per_rank(); ++i) {
      of_rank.count_e.push_back(static_cast<std::int32_t>(
          rows_of_expert(dims, counts_RE.data(), dims.first_expert_of(rank) + i)));
    }
    of_rank.origin_C.assign(begin_e.back(), RowOrigin{-1, 0, 0});
    place_rows(dims, lists, rank, of_rank);
  }
  return plan;
}

std::vector<std::vector<std::int32_t>> random_ids(const RoutingDims& dims,
                                                  const std::vector<std::uint32_t>& num_tokens_R,
                                                  std::mt19937& random) {
  // Sometimes all tokens want few experts: long experts, and many without rows.
  const std::uint32_t most = random() % 3 == 0
                                 ? 1 + random() % static_cast<std::uint32_t>(dims.num_experts)
                                 : static_cast<std::uint32_t>(dims.num_experts);
  std::vector<std::vector<std::int32_t>> ids;
  for (const std::uint32_t num_tokens : num_tokens_R) {
    std::vector<std::int32_t> of_rank(static_cast<std::size_t>(num_tokens) * dims.top_k);
    for (std::int32_t& id : of_rank) {
      id = random() % 8 == 0 ? -1 : static_cast<std::int32_t>(random() % most);
    }
    ids.push_back(std::move(of_rank));
  }
  return ids;
}

}  // namespace megamoe::checker
