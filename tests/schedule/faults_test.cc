// Mistakes that the checker must find: each is seeded into the model's kernels, and must be
// reported as what it is.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "sanitized.h"
#include "schedule/checker.h"

namespace megamoe::checker {
namespace {

using schedule::Shared;

struct Seeded {
  const char* name;
  Fault fault;
  const char* report;  ///< part of what the checker says
};

std::ostream& operator<<(std::ostream& out, const Seeded& seeded) { return out << seeded.name; }

/// Three forward calls and a backward call; or two, the second of which is run backward twice, for
/// what lies beside weight gradients.
enum class Calls { mostly_forward, backward_twice };

/// Enough rows for tiles with several blocks, rows of several chunks.
std::shared_ptr<const LayerModel> problem(Fault fault, std::uint32_t seed, Calls of) {
  std::mt19937 random(seed);
  LayerShape shape;
  shape.dims = {2, 4, 3};
  shape.num_ctas = 4;
  shape.resident_ctas = fault == Fault::pulls_bound_to_ctas ? 2 : 4;
  if (of == Calls::backward_twice && seed % 3 == 0) {
    shape.gradients_beside_dx = true;
    shape.resident_ctas = 8;
  }
  shape.num_h_blocks = 2;
  shape.num_chunks = 1 + seed % 2;
  shape.num_i_tiles = 1 + seed % 3;
  shape.num_k_blocks = 6;
  shape.shared = seed / 2 % 2 == 0 ? Shared::rows : Shared::channels;
  shape.fault = fault;
  shape.deadlines_may_expire = fault == Fault::failed_rank_tells;
  std::vector<CallSpec> calls(4);
  for (CallSpec& call : calls) call.ids = random_ids(shape.dims, {50, 40}, random);
  if (fault == Fault::headers_not_doubled) calls[1].bad_rank = 0;
  calls[3].backward = true;
  calls[3].forward_call = 2;
  if (of == Calls::backward_twice) {
    const bool keeps_all = fault >= Fault::x_not_awaited || seed % 2 == 0;
    calls[2].backward = true;
    for (const std::size_t call : {2, 3}) {
      calls[call].forward_call = 1;
      calls[call].kept = keeps_all ? Kept::all : Kept::some;
    }
  }
  return std::make_shared<LayerModel>(shape, calls);
}

class Faults : public testing::TestWithParam<Seeded> {};

TEST_P(Faults, IsFound) {
  constexpr std::uint32_t kMostRuns = 200;
  const Calls of = GetParam().fault >= Fault::announced_before_push ? Calls::backward_twice
                                                                    : Calls::mostly_forward;
  std::string other;
  for (std::uint32_t seed = 0; seed < kMostRuns; ++seed) {
    const Finding finding = run_at_random(problem(GetParam().fault, seed, of), seed);
    if (finding.ok()) continue;
    if (finding.what.find(GetParam().report) != std::string::npos) {
      RecordProperty("runs", static_cast<int>(seed) + 1);
      EXPECT_FALSE(finding.history.empty());
      std::printf("run %u: %s\n", seed + 1, finding.what.c_str());
      return;
    }
    other = finding.what;
  }
  FAIL() << "not found in " << kMostRuns << " runs; found instead: " << other;
}

TEST(FaultProblems, AreFineWithoutFault) {
  for (std::uint32_t seed = 0; seed < less_if_sanitized(20U, 2U); ++seed) {
    for (const Calls of : {Calls::mostly_forward, Calls::backward_twice}) {
      const Finding finding = run_at_random(problem(Fault::none, seed, of), seed);
      ASSERT_TRUE(finding.ok()) << finding.what << "\n" << finding.history;
    }
  }
}

/// Who is not told early that gradients have come leaves them to the last kernel.
TEST(FaultProblems, AreFineWithoutAnAnnouncement) {
  for (std::uint32_t seed = 0; seed < less_if_sanitized(20U, 2U); ++seed) {
    const auto model = problem(Fault::announcement_dropped, seed, Calls::backward_twice);
    const Finding finding = run_at_random(model, seed);
    ASSERT_TRUE(finding.ok()) << finding.what << "\n" << finding.history;
  }
}

/// A search leaves out what it takes for equal, but not these: a rank of two CTAs that pulls and
/// reduces beside its weight gradients, and a peer. Random runs hardly meet the one that takes a
/// peer's last signal and its end between two looks.
class SearchedFaults : public testing::TestWithParam<Seeded> {};

TEST_P(SearchedFaults, IsFound) {
  if (kSanitized) GTEST_SKIP() << "long searches, of which each step is made by others too";
  constexpr std::uint64_t kMostStates = 400'000;
  LayerShape shape;
  shape.dims = {2, 2, 1};
  shape.num_k_blocks = 3;
  shape.fault = GetParam().fault;
  if (shape.fault >= Fault::joined_before_announcement) {
    shape.gradients_beside_dx = true;
    shape.resident_ctas = 2 * shape.num_ctas;
    shape.num_movers = 1;
  }
  std::vector<CallSpec> calls(3);
  calls[0].ids = {{0}, {0}};
  for (const std::size_t call : {1, 2}) {
    calls[call].backward = true;
    calls[call].kept = Kept::all;
  }
  const Finding finding =
      search_all(std::make_shared<LayerModel>(shape, calls), Reduction::by_order, kMostStates);
  EXPECT_NE(finding.what.find(GetParam().report), std::string::npos) << finding.what;
  std::printf("%llu states: %s\n", static_cast<unsigned long long>(finding.num_states),
              finding.what.c_str());
}

constexpr const char* kNotFenced = "has published it without a proxy fence";
constexpr const char* kReaderNotFenced = "by a copy without a proxy fence since the write";
constexpr const char* kTooEarly = "is read before its write";
constexpr const char* kStillRead = "may still read it";
constexpr const char* kTwice = "is written twice";
constexpr const char* kNobody = "nobody can go on";
constexpr const char* kMustNotWait = "for which it must not wait";
constexpr const char* kTakenForFailed = "is taken for one that has failed";

INSTANTIATE_TEST_SUITE_P(
    Seeded, Faults,
    testing::Values(
        Seeded{"PullWithoutReaderFence", Fault::pull_without_reader_fence, kReaderNotFenced},
        Seeded{"LoadWithoutReaderFence", Fault::load_without_reader_fence, kReaderNotFenced},
        Seeded{"StageWithoutWriterFence", Fault::stage_without_writer_fence, kNotFenced},
        Seeded{"PadsWithoutWriterFence", Fault::pads_without_writer_fence, kNotFenced},
        Seeded{"EpilogueWithoutFence", Fault::epilogue_without_fence, kNotFenced},
        Seeded{"CountedAfterReadWait", Fault::counted_after_read_wait, kTooEarly},
        Seeded{"CountedAGroupEarly", Fault::counted_a_group_early, kTooEarly},
        Seeded{"LastRowCountedAGroupEarly", Fault::last_row_counted_a_group_early, kTooEarly},
        Seeded{"ChunkReusedWithoutWait", Fault::chunk_reused_without_wait, kStillRead},
        Seeded{"StageReleasedAStepEarly", Fault::stage_released_a_step_early, kStillRead},
        Seeded{"SlotGrantedBeforeRead", Fault::slot_granted_before_read, kStillRead},
        Seeded{"LeftWithStoresInFlight", Fault::left_with_stores_in_flight,
               "before its bulk stores are complete"},
        Seeded{"AwaitsFirstBlockOnly", Fault::awaits_first_block_only, "x rows["},
        Seeded{"RowNotCounted", Fault::row_not_counted, kNobody},
        Seeded{"RowCountedBeforeWait", Fault::row_counted_before_wait, kTooEarly},
        Seeded{"RowCountedTwice", Fault::row_counted_twice, "beyond 64"},
        Seeded{"AllDoneBeforeWait", Fault::all_done_before_wait, kTooEarly},
        Seeded{"EnteredSignalDropped", Fault::entered_signal_dropped, kNobody},
        Seeded{"EnteredSignalEarly", Fault::entered_signal_early, "headers["},
        Seeded{"StagedSignalDropped", Fault::staged_signal_dropped, kNobody},
        Seeded{"ResultsSignalDropped", Fault::results_signal_dropped, kNobody},
        Seeded{"FenceBeforeStores", Fault::fence_before_stores, kNotFenced},
        Seeded{"StagedSignalBeforeLists", Fault::staged_signal_before_lists, "pull lists["},
        Seeded{"ResultsSignalBeforePush", Fault::results_signal_before_push, "slots["},
        Seeded{"PullsOrderedBeforeMeeting", Fault::pulls_ordered_before_meeting, "of pulls["},
        Seeded{"EpochReused", Fault::epoch_reused, "headers["},
        Seeded{"CountersNotStartedAgain", Fault::counters_not_started_again, "x rows["},
        Seeded{"PullsNotStartedAgain", Fault::pulls_not_started_again, kNobody},
        Seeded{"RestagedBeforeResults", Fault::restaged_before_results, "staged x["},
        Seeded{"HeadersNotDoubled", Fault::headers_not_doubled, "headers["},
        Seeded{"FailedRankTells", Fault::failed_rank_tells, "headers["},
        Seeded{"PullsBoundToCtas", Fault::pulls_bound_to_ctas, kNobody},
        Seeded{"WordOfLeavingTooEarly", Fault::word_of_leaving_too_early, kTakenForFailed},
        Seeded{"AnnouncedBeforePush", Fault::announced_before_push, "slots["},
        Seeded{"AnnouncedBeforeDweights", Fault::announced_before_dweights, "slots of dw["},
        Seeded{"AnnouncedByAPushWarp", Fault::announced_by_a_push_warp, "slots["},
        Seeded{"ReduceWithoutReaderFence", Fault::reduce_without_reader_fence, kReaderNotFenced},
        Seeded{"ReduceBufferWithoutWait", Fault::reduce_buffer_without_wait, kTooEarly},
        Seeded{"ReduceBufferWithoutFence", Fault::reduce_buffer_without_fence,
               "is overwritten by a copy without a proxy fence"},
        Seeded{"ReduceBufferRefilledEarly", Fault::reduce_buffer_refilled_early,
               "may still be under way"},
        Seeded{"RestForgotten", Fault::rest_forgotten, "unwritten"},
        Seeded{"RestFromZero", Fault::rest_from_zero, kTwice},
        Seeded{"RestBeforeWeightGradients", Fault::rest_before_weight_gradients, kTwice},
        Seeded{"RestBesideWeightGradients", Fault::rest_beside_weight_gradients,
               "is read while it may still change"},
        Seeded{"RestBeforeMeeting", Fault::rest_before_meeting, "slots"},
        Seeded{"ReducedNotStartedAgain", Fault::reduced_not_started_again, "unwritten"},
        Seeded{"XNotAwaited", Fault::x_not_awaited, "x rows["},
        Seeded{"XAwaitedWithoutFence", Fault::x_awaited_without_fence, kReaderNotFenced},
        Seeded{"XPullsNotStartedAgain", Fault::x_pulls_not_started_again, "x rows["},
        Seeded{"ResultsSignalBeforeWeightGradients", Fault::results_signal_before_weight_gradients,
               "staged x["},
        Seeded{"AnnouncedBehindGradients", Fault::announced_behind_gradients, kMustNotWait},
        Seeded{"DweightsBehindGradients", Fault::dweights_behind_gradients, kMustNotWait},
        Seeded{"JoinedBeforeAnnouncement", Fault::joined_before_announcement, kMustNotWait},
        Seeded{"PushAwaitsGradients", Fault::push_awaits_gradients, kMustNotWait}),
    [](const auto& seeded) { return std::string(seeded.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Seeded, SearchedFaults,
    testing::Values(
        Seeded{"AnnouncedBeforePush", Fault::announced_before_push, "slots["},
        Seeded{"AnnouncedBeforeDweights", Fault::announced_before_dweights, "slots of dw["},
        Seeded{"EnteredSignalDropped", Fault::entered_signal_dropped, kNobody},
        Seeded{"EnteredSignalEarly", Fault::entered_signal_early, "headers["},
        Seeded{"WordOfLeavingWithoutLastLook", Fault::word_of_leaving_without_last_look,
               kTakenForFailed},
        Seeded{"WordOfLeavingTooEarly", Fault::word_of_leaving_too_early, kTakenForFailed},
        Seeded{"RestForgotten", Fault::rest_forgotten, "unwritten"},
        Seeded{"RestFromZero", Fault::rest_from_zero, kTwice},
        Seeded{"RestBeforeMeeting", Fault::rest_before_meeting, "slots"},
        Seeded{"ReducedNotStartedAgain", Fault::reduced_not_started_again, "unwritten"},
        Seeded{"XNotAwaited", Fault::x_not_awaited, "x rows["},
        Seeded{"XPullsNotStartedAgain", Fault::x_pulls_not_started_again, "x rows["},
        Seeded{"ResultsSignalBeforeWeightGradients", Fault::results_signal_before_weight_gradients,
               "staged x["},
        Seeded{"AnnouncedBehindGradients", Fault::announced_behind_gradients, kMustNotWait},
        Seeded{"DweightsBehindGradients", Fault::dweights_behind_gradients, kMustNotWait},
        Seeded{"JoinedBeforeAnnouncement", Fault::joined_before_announcement, kMustNotWait},
        Seeded{"PushAwaitsGradients", Fault::push_awaits_gradients, kMustNotWait}),
    [](const auto& seeded) { return std::string(seeded.param.name); });

}  // namespace
}  // namespace megamoe::checker
