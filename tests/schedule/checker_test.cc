// The protocol of the layer's calls holds in every interleaving of small problems, and in many of
// large ones. `--long`, or MEGAMOE_CHECKER_LONG in the environment, runs thirty times as many.
#include "schedule/checker.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "sanitized.h"

namespace megamoe::checker {
namespace {

using schedule::Shared;
using Model = std::shared_ptr<const LayerModel>;
using Ids = std::vector<std::vector<std::int32_t>>;

bool is_long = false;  // set by main()

std::uint32_t times(std::uint32_t runs) {
  return is_long ? runs * 30 : less_if_sanitized(runs, runs / 50 + 1);
}

CallSpec forward(Ids ids, std::int32_t bad_rank = -1) {
  CallSpec call;
  call.ids = std::move(ids);
  call.bad_rank = bad_rank;
  return call;
}

CallSpec backward_of(std::uint32_t forward_call, Kept kept = Kept::nothing) {
  CallSpec call;
  call.backward = true;
  call.kept = kept;
  call.forward_call = forward_call;
  return call;
}

Model model_of(const LayerShape& shape, std::vector<CallSpec> calls) {
  return std::make_shared<const LayerModel>(shape, std::move(calls));
}

void expect_fine(const Finding& finding, const std::string& what) {
  EXPECT_TRUE(finding.ok()) << what << ": " << finding.what << "\n" << finding.history;
}

/// A problem small enough to search: one cluster of two CTAs a rank.
struct Small {
  const char* name;
  RoutingDims dims;
  std::vector<CallSpec> calls;
  std::uint32_t num_h_blocks = 1;
  std::uint32_t num_chunks = 1;
  std::uint32_t num_i_tiles = 1;
  bool deadlines_may_expire = false;
};

std::ostream& operator<<(std::ostream& out, const Small& small) { return out << small.name; }

/// As Searched, with gradients beside dx, on SMs of their own.
class SearchedBesideDx : public testing::TestWithParam<std::tuple<Small, Shared>> {};

class Searched : public testing::TestWithParam<std::tuple<Small, bool, Shared>> {};

LayerShape shape_of(const Small& small, Shared shared) {
  LayerShape shape;
  shape.dims = small.dims;
  shape.num_h_blocks = small.num_h_blocks;
  shape.num_chunks = small.num_chunks;
  shape.num_i_tiles = small.num_i_tiles;
  shape.num_k_blocks = std::max(3U, 2 * small.num_i_tiles);
  shape.shared = shared;
  shape.deadlines_may_expire = small.deadlines_may_expire;
  return shape;
}

void search(const LayerShape& shape, const Small& small) {
  const Finding finding = search_all(model_of(shape, small.calls), Reduction::by_order,
                                     less_if_sanitized(times(400'000), 500U));
  testing::Test::RecordProperty("states", static_cast<int>(finding.num_states));
  std::printf("%llu states, %llu steps\n", static_cast<unsigned long long>(finding.num_states),
              static_cast<unsigned long long>(finding.num_steps));
  if (kSanitized && finding.what == kTooManyStates) return;
  expect_fine(finding, small.name);
}

TEST_P(Searched, EveryInterleavingIsFine) {
  const auto& [small, overlap, shared] = GetParam();
  LayerShape shape = shape_of(small, shared);
  shape.overlap = overlap;
  search(shape, small);
}

TEST_P(SearchedBesideDx, EveryInterleavingIsFine) {
  const auto& [small, shared] = GetParam();
  LayerShape shape = shape_of(small, shared);
  shape.gradients_beside_dx = true;
  shape.resident_ctas = 2 * shape.num_ctas;
  shape.num_movers = 1;  // two with both kernels; Searched has two in one
  search(shape, small);
}

INSTANTIATE_TEST_SUITE_P(
    Small, SearchedBesideDx,
    testing::Combine(
        testing::Values(
            Small{"OneRankKept", {1, 2, 1}, {forward({{0, 1}}), backward_of(0, Kept::all)}},
            Small{"TwoRanks", {2, 2, 1}, {forward({{0}, {0}}), backward_of(0)}},
            Small{"TwoRanksKept", {2, 2, 1}, {forward({{1}, {0}}), backward_of(0, Kept::all)}},
            Small{"KeptSomeThenAll",
                  {2, 2, 1},
                  {forward({{1}, {}}), backward_of(0, Kept::some), backward_of(0, Kept::all)}}),
        testing::Values(Shared::rows, Shared::channels)),
    [](const auto& param) {
      return std::string(std::get<0>(param.param).name) +
             (std::get<1>(param.param) == Shared::rows ? "SharingRows" : "SharingChannels");
    });

INSTANTIATE_TEST_SUITE_P(
    Small, Searched,
    testing::Combine(
        testing::Values(
            Small{"OneRank", {1, 2, 2}, {forward({{0, 1, 1, -1}}), backward_of(0)}},
            Small{"OneRankManyTiles", {1, 2, 1}, {forward({{0, 1}})}, 2, 2, 3},
            Small{"TwoRanks", {2, 2, 1}, {forward({{0, 1}, {0, 1}}), backward_of(0)}},
            Small{"TwoExpertsEach", {2, 4, 2}, {forward({{0, 2}, {3, 0}})}, 2, 2, 2},
            Small{
                "TwoRanksKept", {2, 2, 1}, {forward({{0, 1}, {0, 1}}), backward_of(0, Kept::all)}},
            Small{"OneRankKept",
                  {1, 2, 2},
                  {forward({{0, 1, 1, -1}}), backward_of(0, Kept::all), backward_of(0, Kept::all)},
                  2},
            Small{"TwoRanksKeptSome",
                  {2, 2, 1},
                  {forward({{0, 1}, {0, 1}}), backward_of(0, Kept::some)}},
            Small{"NoTokensOnARank", {2, 2, 1}, {forward({{0, 1, 1}, {}}), backward_of(0)}},
            Small{"NothingAtAll", {2, 2, 1}, {forward({{}, {-1}}), backward_of(0)}},
            Small{"AllToOneExpert", {2, 2, 2}, {forward({{1, 1, 1, 1}, {1, -1}})}},
            Small{"ThreeCalls",
                  {2, 2, 1},
                  {forward({{0, 1}, {1}}), forward({{1}, {0, 0}}), forward({{0}, {1}})}},
            Small{"ABadIdBetween",
                  {2, 2, 1},
                  {forward({{0}, {1}}), forward({{1}, {0}}, 0), forward({{1}, {0}}, 1),
                   forward({{1}, {0}}), backward_of(1), backward_of(3)}},
            Small{"ALateRank",
                  {2, 2, 1},
                  {forward({{0}, {1}}), forward({{1}, {0}}), backward_of(0, Kept::all),
                   forward({{1}, {0}})},
                  1,
                  1,
                  1,
                  true},
            Small{"TwoForwardsInFlight",
                  {2, 2, 1},
                  {forward({{0}, {1}}), forward({{1}, {0}}), backward_of(1),
                   backward_of(0, Kept::all)}}),
        testing::Bool(), testing::Values(Shared::rows, Shared::channels)),
    [](const auto& param) {
      return std::string(std::get<0>(param.param).name) +
             (std::get<1>(param.param) ? "Overlap" : "Chain") +
             (std::get<2>(param.param) == Shared::rows ? "SharingRows" : "SharingChannels");
    });

/// The search leaves out interleavings that it takes for equal. On problems where all of them can
/// be searched nothing else comes out.
void expect_harmless(const LayerShape& shape, const Ids& ids, Reduction less, Reduction more) {
  const Model model = model_of(shape, {forward(ids)});
  const Finding all = search_all(model, less, 200'000);
  const Finding reduced = search_all(model, more, 200'000);
  EXPECT_EQ(all.what, reduced.what);
  EXPECT_EQ(all.ok(), shape.fault == Fault::none) << all.what;
  EXPECT_GE(all.num_states, reduced.num_states);
}

TEST(Search, ReductionIsHarmless) {
  if (kSanitized) GTEST_SKIP() << "a long search, of which each step is made by others too";
  LayerShape shape;
  shape.dims = {2, 2, 1};
  shape.overlap = false;
  for (const Fault fault : {Fault::none, Fault::results_signal_dropped}) {
    shape.fault = fault;
    expect_harmless(shape, {{}, {}}, Reduction::none, Reduction::by_order);
    expect_harmless(shape, {{-1}, {-1}}, Reduction::none, Reduction::by_order);
  }
}

/// With a row of each rank there are too many orders of all steps, but not of those that the search
/// does not take at once. Rows stay with their rank, or both cross.
TEST(Search, ReductionByOrderIsHarmlessWithATokenOnEachRank) {
  if (kSanitized) GTEST_SKIP() << "a long search, of which each step is made by others too";
  LayerShape shape;
  shape.dims = {2, 2, 1};
  for (const Fault fault :
       {Fault::none, Fault::load_without_reader_fence, Fault::last_row_counted_a_group_early,
        Fault::slot_granted_before_read, Fault::row_not_counted, Fault::results_signal_dropped,
        Fault::restaged_before_results}) {
    SCOPED_TRACE(static_cast<int>(fault));
    shape.fault = fault;
    for (const Ids& ids : {Ids{{0}, {1}}, Ids{{1}, {0}}}) {
      expect_harmless(shape, ids, Reduction::free_steps, Reduction::by_order);
    }
  }
}

/// Nor with a kernel that runs beside the stream's, and waits for a signal that this one sends.
TEST(Search, ReductionByOrderIsHarmlessWithGradientsBesideDx) {
  if (kSanitized) GTEST_SKIP() << "a long search, of which each step is made by others too";
  LayerShape shape;
  shape.gradients_beside_dx = true;
  shape.resident_ctas = 2 * shape.num_ctas;
  shape.num_movers = 1;
  const auto expect_equal = [&](const std::vector<CallSpec>& calls) {
    const Model model = model_of(shape, calls);
    const Finding all = search_all(model, Reduction::free_steps, 200'000);
    const Finding reduced = search_all(model, Reduction::by_order, 200'000);
    EXPECT_EQ(all.what, reduced.what);
    EXPECT_EQ(all.ok(), shape.fault == Fault::none) << all.what;
    EXPECT_GE(all.num_states, reduced.num_states);
  };
  for (const Fault fault : {Fault::none, Fault::x_not_awaited, Fault::rest_from_zero,
                            Fault::reduced_not_started_again, Fault::push_awaits_gradients}) {
    SCOPED_TRACE(static_cast<int>(fault));
    shape.fault = fault;
    shape.dims = {1, 1, 1};
    expect_equal({forward({{0}}), backward_of(0, Kept::all), backward_of(0, Kept::all)});
  }
  shape.dims = {2, 2, 1};
  for (const Fault fault :
       {Fault::none, Fault::rest_before_meeting, Fault::announced_before_push}) {
    SCOPED_TRACE(static_cast<int>(fault));
    shape.fault = fault;
    expect_equal({forward({{1}, {}}), backward_of(0)});
  }
}

/// A problem of up to `max_ranks` ranks x `max_ctas` CTAs with a few calls of every kind.
Model random_model(std::uint32_t max_ranks, std::uint32_t max_ctas, std::uint32_t max_tokens,
                   std::mt19937& random) {
  const auto pick = [&](std::uint32_t most) { return 1 + random() % most; };
  LayerShape shape;
  const auto num_ranks = static_cast<std::int32_t>(pick(max_ranks));
  shape.dims = {num_ranks, num_ranks * static_cast<std::int32_t>(pick(4)),
                static_cast<std::int32_t>(pick(4))};
  shape.num_ctas = 2 * pick(max_ctas / 2);
  shape.resident_ctas = random() % 2 == 0 ? shape.num_ctas : 2 * pick(shape.num_ctas / 2);
  shape.num_chunks = pick(3);
  shape.num_h_blocks = shape.num_chunks * pick(2);
  shape.num_i_tiles = pick(3);
  shape.num_k_blocks = std::max({3U, shape.num_h_blocks, 2 * shape.num_i_tiles}) + random() % 2;
  shape.shared = random() % 2 == 0 ? Shared::rows : Shared::channels;
  shape.overlap = random() % 4 != 0;
  shape.deadlines_may_expire = random() % 8 == 0;
  if (random() % 3 == 0) {
    shape.gradients_beside_dx = true;
    shape.resident_ctas += random() % 2 == 0 ? shape.num_ctas : 0;
  }
  std::vector<CallSpec> calls;
  std::vector<std::uint32_t> forwards;
  for (std::uint32_t i = 0; i < 2 + random() % 3; ++i) {
    if (!forwards.empty() && random() % 2 == 0) {
      const Kept kept = static_cast<Kept>(random() % 3);
      calls.push_back(backward_of(forwards[random() % forwards.size()], kept));
      continue;
    }
    forwards.push_back(static_cast<std::uint32_t>(calls.size()));
    std::vector<std::uint32_t> num_tokens;
    for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
      num_tokens.push_back(random() % 4 == 0 ? 0 : pick(max_tokens));
    }
    const bool is_bad = random() % 5 == 0;
    calls.push_back(forward(random_ids(shape.dims, num_tokens, random),
                            is_bad ? static_cast<std::int32_t>(random()) % num_ranks : -1));
  }
  return model_of(shape, std::move(calls));
}

void run_many(std::uint32_t num_runs, std::uint32_t max_ranks, std::uint32_t max_ctas,
              std::uint32_t max_tokens, std::uint32_t first_seed) {
  std::uint64_t num_steps = 0;
  for (std::uint32_t seed = first_seed; seed < first_seed + num_runs; ++seed) {
    std::mt19937 random(seed);
    const Model model = random_model(max_ranks, max_ctas, max_tokens, random);
    const Finding finding = run_at_random(model, seed);
    num_steps += finding.num_steps;
    ASSERT_TRUE(finding.ok()) << "seed " << seed << ": " << finding.what << "\n" << finding.history;
  }
  std::printf("%llu steps\n", static_cast<unsigned long long>(num_steps));
}

TEST(Random, SmallProblems) { run_many(times(1500), 3, 4, 12, 0); }
TEST(Random, UpToEightRanksOfSixteenCtas) { run_many(times(1000), 8, 16, 16, 100'000); }
TEST(Random, LongExperts) { run_many(times(60), 2, 8, 500, 200'000); }

TEST(Random, SixtyFourRanksOf132Ctas) {
  constexpr std::int32_t kRanks = less_if_sanitized(64, 8);
  for (std::uint32_t seed = 0; seed < times(10); ++seed) {
    std::mt19937 random(seed);
    LayerShape shape;
    shape.dims = {kRanks, 2 * kRanks, 4};
    shape.num_ctas = 132;
    shape.resident_ctas = 132;
    shape.num_k_blocks = 3;
    shape.shared = seed % 2 == 0 ? Shared::rows : Shared::channels;
    std::vector<std::uint32_t> num_tokens;
    for (int rank = 0; rank < kRanks; ++rank) num_tokens.push_back(random() % 32);
    std::vector<CallSpec> calls = {forward(random_ids(shape.dims, num_tokens, random))};
    if (seed % 3 == 1) {
      calls.push_back(backward_of(0, seed % 2 == 0 ? Kept::all : Kept::nothing));
    }
    const Finding finding = run_at_random(model_of(shape, calls), seed);
    std::printf("%llu steps\n", static_cast<unsigned long long>(finding.num_steps));
    ASSERT_TRUE(finding.ok()) << "seed " << seed << ": " << finding.what << "\n" << finding.history;
  }
}

}  // namespace
}  // namespace megamoe::checker

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  megamoe::checker::is_long = std::getenv("MEGAMOE_CHECKER_LONG") != nullptr;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--long") megamoe::checker::is_long = true;
  }
  return RUN_ALL_TESTS();
}
