// Ranks that throw, vanish, stall or do something else than their peers: nobody hangs, and
// everybody learns who it was.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "layer_fixture.h"

namespace megamoe::verify {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Starts `rank_main` for every rank on its own thread; unlike run_ranks() it keeps all errors.
std::vector<std::optional<Error>> errors_of_ranks(
    int num_ranks, const std::function<void(Communicator&)>& rank_main) {
  auto communicators = make_thread_communicators(num_ranks);
  std::vector<std::optional<Error>> errors(num_ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      errors[rank] = error_of([&] { rank_main(*communicators[rank]); });
      if (errors[rank]) communicators[rank]->abort(errors[rank]->what());
      communicators[rank].reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

void expect_texts(const std::optional<Error>& error, ErrorCode code,
                  const std::vector<std::string>& texts) {
  expect_error(code, texts, [&] {
    if (error) throw Error(*error);
  });
}

Problem problem_of(int num_ranks) {
  return make_problem(spec_with_tokens(std::vector<std::int64_t>(num_ranks, 6)));
}

TEST(Failure, ARankThatThrowsBetweenCallsFailsItsPeersAtOnce) {
  const Problem problem = problem_of(4);
  const Clock::time_point start = Clock::now();
  const auto errors = errors_of_ranks(4, [&](Communicator& group) {
    RankSession session(problem, {}, group);
    const CallContext context = session.forward();
    if (group.rank() == 2) throw Error(ErrorCode::internal, "the disk is full");
    session.backward(context);
  });
  EXPECT_LT(seconds_since(start), 20.0);  // the deadlines are 60 s
  expect_texts(errors[2], ErrorCode::internal, {"the disk is full"});
  // Peers name rank 2, or a peer that had already failed because of it.
  for (const int rank : {0, 1, 3}) {
    expect_texts(errors[rank], ErrorCode::peer_failed, {"rank 2", "the disk is full"});
  }
}

TEST(Failure, ARankThatVanishesIsNamed) {
  const Problem problem = problem_of(2);
  const auto errors = errors_of_ranks(2, [&](Communicator& group) {
    RankSession session(problem, {}, group);
    const CallContext context = session.forward();
    if (group.rank() == 1) return;
    session.backward(context);
  });
  EXPECT_FALSE(errors[1]);
  expect_texts(errors[0], ErrorCode::peer_failed, {"rank 1", "MoeLayer::backward"});
}

TEST(Failure, ARankThatIsDoneMayLeaveWhileOthersStillWork) {
  ProblemSpec spec = spec_with_tokens({6, 1, 9});
  spec.num_experts = 6;
  const Problem problem = make_problem(spec);
  const LayerTensors wanted = run_layer(problem, {});
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::vector<LayerTensors> tensors_R(3);
    const auto errors = errors_of_ranks(3, [&](Communicator& group) {
      RankSession session(problem, {}, group);
      const CallContext context = session.forward();
      session.backward(context);
      tensors_R[group.rank()] = session.tensors();
    });
    for (const int rank : {0, 1, 2}) {
      ASSERT_FALSE(errors[rank]) << "rank " << rank << ": " << errors[rank]->what();
    }
    EXPECT_EQ(differing_tensors(concatenate(tensors_R), wanted), "");
  }
}

TEST(Failure, AMissedDeadlineNamesTheMissingRankAndStays) {
  const Problem problem = problem_of(4);
  RunOptions options;
  options.deadline_s = 0.5;
  std::atomic<bool> others_are_done{false};
  std::atomic<int> num_failed{0};
  const auto errors = errors_of_ranks(4, [&](Communicator& group) {
    RankSession session(problem, options, group);
    if (group.rank() == 1) {
      while (!others_are_done) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      session.forward();  // too late
      return;
    }
    const Clock::time_point start = Clock::now();
    const std::optional<Error> error = error_of([&] { session.forward(); });
    EXPECT_LT(seconds_since(start), 20.0);
    expect_texts(error, ErrorCode::deadline_exceeded, {"MoeLayer::forward", "missing: rank 1"});
    if (++num_failed == 3) others_are_done = true;
    session.forward();
  });
  for (const std::optional<Error>& error : errors) {
    expect_texts(error, ErrorCode::deadline_exceeded, {"rank 1"});
  }
}

TEST(Failure, ConstructionHasADeadlineToo) {
  const Problem problem = problem_of(2);
  RunOptions options;
  options.deadline_s = 0.3;
  std::atomic<bool> done{false};
  const auto errors = errors_of_ranks(2, [&](Communicator& group) {
    if (group.rank() == 1) {
      while (!done) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      return;
    }
    const std::optional<Error> error =
        error_of([&] { const RankSession session(problem, options, group); });
    done = true;
    if (error) throw Error(*error);
  });
  expect_texts(errors[0], ErrorCode::deadline_exceeded, {"construction", "rank 1"});
}

TEST(DifferentCalls, ForwardAndBackward) {
  const Problem problem = problem_of(2);
  const LayerTensors clean = run_layer(problem, {});
  const LayerTensors after =
      run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
        const CallContext context = session.forward();
        expect_error(ErrorCode::config_mismatch,
                     {"different calls", "rank 0 is at the entry into MoeLayer::forward",
                      "rank 1 at the entry into MoeLayer::backward"},
                     [&] {
                       if (group.rank() == 0) {
                         session.forward();
                       } else {
                         session.backward(context);
                       }
                     });
        const CallContext again = session.forward();  // still usable
        session.backward(again);
      });
  EXPECT_EQ(differing_tensors(after, clean), "");
}

TEST(DifferentCalls, TwoLayersAndTwoContexts) {
  const Problem problem = problem_of(2);
  run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
    MoeLayer other(layer_config(problem.spec, {}), group, session.workspace());
    expect_error(ErrorCode::config_mismatch, {"different calls", "layer 0", "layer 1"},
                 [&] { session.data().forward(group.rank() == 0 ? session.layer() : other); });
    const CallContext first = session.forward();
    const CallContext second = session.forward();
    expect_error(ErrorCode::config_mismatch, {"different calls", "backward of call"},
                 [&] { session.backward(group.rank() == 0 ? first : second); });
    session.backward(second);
    session.backward(first);
  });
}

TEST(DifferentCalls, LayersOfTwoWorkspaces) {
  const Problem problem = problem_of(2);
  run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
    RankSession other(problem, {}, group);
    expect_error(ErrorCode::config_mismatch, {"different calls"},
                 [&] { group.rank() == 0 ? session.forward() : other.forward(); });
    const CallContext context = session.forward();
    session.backward(context);
  });
}

TEST(DifferentCalls, LayersOfDifferentSizes) {
  // Their entries have different sizes: no rank may read beyond what a peer offers.
  const Problem small = problem_of(2);
  ProblemSpec spec = small.spec;
  spec.num_experts = 64;
  const Problem large = make_problem(spec);
  run_sessions(small, {}, [&](RankSession& session, Communicator& group) {
    RankSession other(large, {}, group);
    expect_error(ErrorCode::config_mismatch, {"rank 0", "rank 1"},
                 [&] { group.rank() == 0 ? session.forward() : other.forward(); });
    const CallContext context = session.forward();
    session.backward(context);
  });
}

TEST(DifferentCalls, AForwardAndAConstruction) {
  const Problem problem = problem_of(2);
  run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
    expect_error(ErrorCode::config_mismatch, {"rank 0", "rank 1", "MoeLayer::forward"}, [&] {
      if (group.rank() == 0) {
        session.forward();
      } else {
        const MoeLayer layer(layer_config(problem.spec, {}), group, session.workspace());
      }
    });
    const CallContext context = session.forward();
    session.backward(context);
  });
}

TEST(DifferentCalls, AForwardAndABarrier) {
  const Problem problem = problem_of(2);
  run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
    expect_error(ErrorCode::config_mismatch, {"rank 0", "rank 1", "my own barrier"}, [&] {
      if (group.rank() == 0) {
        session.forward();
      } else {
        group.barrier("my own barrier", 60);
      }
    });
    const CallContext context = session.forward();
    session.backward(context);
  });
}

}  // namespace
}  // namespace megamoe::verify
