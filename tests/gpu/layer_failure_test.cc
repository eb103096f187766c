// Ranks that are late, raise or refuse, and what a failed call leaves behind.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <stdexcept>

#include "gpu/behind_rows.h"
#include "gpu/held_memory.h"
#include "gpu/layer_device.h"
#include "gpu/unchecked_calls.h"

namespace megamoe::verify {
namespace {

using cuda::check;

TEST(CudaFailures, AMissedDeadlineNamesThePeerAndStays) {
  const Problem problem = make_problem(spec_with_tokens({12, 12}));
  RunOptions options;
  options.deadline_s = 1.0;
  run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
    const CallContext context = session.forward();
    group.barrier("both have run", 60);
    if (group.rank() == 0) {
      const auto start = std::chrono::steady_clock::now();
      expect_error(ErrorCode::deadline_exceeded, {"rank 0 waited", "rank 1", "the entry"},
                   [&] { session.backward(context); });
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      EXPECT_LT(taken.count(), 10.0);
      expect_error(ErrorCode::deadline_exceeded, {"rank 1"}, [&] { session.forward(); });
    }
    group.barrier("the deadline has passed", 60);
    if (group.rank() == 1) {
      expect_error(ErrorCode::peer_failed, {"rank 0"}, [&] { session.backward(context); });
    }
  });
}

TEST(CudaFailures, ADeadlineMayBeAsLongAsADoubleHolds) {
  const Problem problem = make_problem(spec_with_tokens({12, 12}));
  RunOptions options;
  options.deadline_s = 1e300;
  expect_right(problem, options);
}

TEST(CudaFailures, APeerThatRaisesBetweenCallsIsNamedLongBeforeTheDeadline) {
  const Problem problem = make_problem(spec_with_tokens({12, 12}));
  const auto start = std::chrono::steady_clock::now();
  std::optional<Error> of_survivor;
  const auto run = [&] {
    run_ranks(2, [&](Communicator& group) {
      RankSession session(problem, {}, group);
      const CallContext context = session.forward();
      if (group.rank() == 1) throw Error(ErrorCode::internal, "the disk is full");
      of_survivor = error_of([&] { session.backward(context); });
    });
  };
  expect_error(ErrorCode::internal, {"the disk is full"}, run);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  EXPECT_LT(taken.count(), 20.0);  // the deadlines are 60 s
  ASSERT_TRUE(of_survivor);
  EXPECT_EQ(of_survivor->code(), ErrorCode::peer_failed);
  EXPECT_NE(std::string(of_survivor->what()).find("rank 1"), std::string::npos);
  EXPECT_NE(std::string(of_survivor->what()).find("the disk is full"), std::string::npos);
}

TEST(CudaFailures, APeerThatRaisesIsNamedWhereNobodyChecks) {
  const Problem problem = make_problem(spec_with_tokens({12, 12}));
  RunOptions options;
  options.deadline_s = 20.0;
  for (const bool host_waits : {true, false}) {
    const auto start = std::chrono::steady_clock::now();
    std::optional<Error> of_survivor;
    const auto run = [&] {
      run_ranks(2, [&](Communicator& group) {
        RankSession session(problem, options, group);
        session.forward();
        if (group.rank() == 1) throw Error(ErrorCode::internal, "the disk is full");
        UncheckedCalls calls(session, group);
        of_survivor = error_of([&] {
          for (;;) {
            calls.forward();
            if (host_waits) calls.synchronize();
          }
        });
      });
    };
    expect_error(ErrorCode::internal, {"the disk is full"}, run);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    EXPECT_LT(taken.count(), 10.0);
    expect_error(ErrorCode::peer_failed, {"rank 0 waited", "rank 1", "the disk is full"}, [&] {
      if (of_survivor) throw Error(*of_survivor);
    });
  }
}

struct NoStdException {};

/// Rank 1 has sent and announced its dx when a launch fails: of its results it says nothing else.
TEST(CudaFailures, APeerThatFailsOnceItsRowsAreSentIsNamedWithWhatWasAwaited) {
  const auto fails = [] { throw std::runtime_error("no such kernel"); };
  const auto fails_oddly = [] { throw NoStdException(); };
  for (const std::function<void()>& launch : {std::function<void()>(fails), {fails_oddly}}) {
    for (const auto& make_call : {gradients_behind_rows, gradients_beside_rows}) {
      BehindRows call = make_call();
      call.options.deadline_s = 30.0;
      std::optional<Error> of_survivor;
      std::optional<Error> afterwards;
      double seconds = 0.0;
      const auto run = [&] {
        run_ranks(2, [&](Communicator& group) {
          RankSession session(call.problem, call.options, group);
          const CallContext context = session.forward();
          if (group.rank() == 1) {
            const OnceRowsAreSent failing(call, launch);
            session.backward(context);
            ADD_FAILURE() << "the rank has made the whole call";
          }
          const auto start = std::chrono::steady_clock::now();
          of_survivor = error_of([&] { session.backward(context); });
          seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
          afterwards = error_of([&] { session.forward(); });
        });
      };
      EXPECT_ANY_THROW(run());
      EXPECT_LT(seconds, 10.0);  // the deadlines are 30 s
      for (const std::optional<Error>& error : {of_survivor, afterwards}) {
        expect_error(ErrorCode::peer_failed,
                     {"rank 0 waited for expert outputs of rank 1 in call 2"}, [&] {
                       if (error) throw Error(*error);
                     });
      }
    }
  }
}

/// The same with a rank that is there and does not go on.
TEST(CudaFailures, APeerThatStopsOnceItsRowsAreSentIsNamedAtTheDeadline) {
  for (const auto& make_call : {gradients_behind_rows, gradients_beside_rows}) {
    BehindRows call = make_call();
    call.options.deadline_s = 1.0;
    std::promise<void> deadline_has_passed;
    run_sessions(call.problem, call.options, [&](RankSession& session, Communicator& group) {
      const CallContext context = session.forward();
      if (group.rank() == 1) {
        const OnceRowsAreSent stopped(call, [&] {
          const auto passed = deadline_has_passed.get_future().wait_for(std::chrono::seconds(20));
          EXPECT_EQ(passed, std::future_status::ready);
        });
        session.backward(context);  // late, but rank 0 had sent all of its part
        EXPECT_TRUE(stopped.has_come());
        expect_error(ErrorCode::peer_failed, {"rank 0"}, [&] { session.forward(); });
        return;
      }
      const auto start = std::chrono::steady_clock::now();
      expect_error(ErrorCode::deadline_exceeded,
                   {"rank 0 waited for expert outputs of rank 1 in call 2 (last seen in call 1)",
                    "the deadline has passed"},
                   [&] { session.backward(context); });
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      EXPECT_LT(taken.count(), 10.0);
      expect_error(ErrorCode::deadline_exceeded, {"rank 1"}, [&] { session.forward(); });
      deadline_has_passed.set_value();
    });
  }
}

TEST(CudaFailures, ARankThatIsDoneMayLeaveWhileOthersStillWork) {
  ProblemSpec spec = spec_with_tokens({40, 1, 300});
  spec.num_experts = 6;
  const Problem problem = make_problem(spec);
  const LayerTensors wanted = run_layer(problem, {});
  for (int repeat = 0; repeat < 10; ++repeat) {
    const LayerTensors actual =
        run_sessions(problem, {}, [&](RankSession& session, Communicator& /*group*/) {
          const CallContext context = session.forward();
          session.backward(context);
        });
    EXPECT_EQ(differing_tensors(actual, wanted), "");
  }
}

TEST(CudaFailures, OneRanksRefusalFailsTheCallOnAll) {
  const Problem problem = make_problem(spec_with_tokens({12, 12}));
  const LayerTensors clean = run_layer(problem, {});
  const LayerTensors after =
      run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
        for (int repeat = 0; repeat < 3; ++repeat) {
          if (group.rank() == 0) {
            expect_error(ErrorCode::invalid_argument, {"context is not of a forward call"},
                         [&] { session.backward(CallContext()); });
          } else {
            expect_error(ErrorCode::invalid_argument, {"rank 0 refused"},
                         [&] { session.forward(); });
          }
        }
        const CallContext context = session.forward();
        session.backward(context);
      });
  EXPECT_EQ(differing_tensors(after, clean), "");
}

TEST(CudaFailures, ARankWithoutMemoryForItsContextFailsTheCallOnAll) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  ProblemSpec spec = spec_with_tokens({40, 40});
  RunOptions options;
  options.saved_row_capacity = 1 << 20;  // g and u of a context take 256 MiB
  options.row_capacity = 1 << 20;
  const Problem problem = make_problem(spec);
  run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
    const CallContext first = session.forward();
    session.backward(first);
    const LayerTensors wanted = session.tensors();
    group.barrier("both have a context", 60);
    if (group.rank() == 1) {
      const HeldMemory held(1, 16 << 20);
      expect_error(ErrorCode::out_of_memory, {"device 1", "bytes for saved g"},
                   [&] { session.forward(); });
    } else {
      expect_error(ErrorCode::out_of_memory, {"rank 1 refused"}, [&] { session.forward(); });
    }
    group.barrier("the call has failed", 60);
    const CallContext second = session.forward();
    session.backward(second);
    EXPECT_EQ(differing_tensors(session.tensors(), wanted), "");
  });
}

/// Of two ranks, a device each or on one: neither NCCL nor CUDA gives a terabyte.
TEST(CudaFailures, AWorkspaceThatDoesNotFitIsRefusedWithItsSizeOnEveryRank) {
  const LayerConfig small = cuda_config(spec_with_tokens({12, 12}));
  LayerConfig large = small;
  large.shape.hidden_dim = 8192;
  large.shape.max_tokens = 1 << 24;
  large.row_capacity = 1 << 20;
  const std::string bytes = std::to_string(workspace_bytes(large, 2).symmetric) + " bytes";
  run_ranks(2, [&](Communicator& threads) {
    const BackendGroup backend_group(threads, {});
    Communicator& group = backend_group.get();
    for (int attempt = 0; attempt < 2; ++attempt) {
      expect_error(ErrorCode::out_of_memory, {"could not allocate", bytes, "symmetric heap"},
                   [&] { const Workspace workspace(large, group); });
    }
    Workspace workspace(small, group);  // the group has survived
    const MoeLayer layer(small, group, workspace);
  });
}

TEST(CudaFailures, AFailureStaysUntilItIsChecked) {
  Problem problem = make_problem(spec_with_tokens({24}));
  const DeviceProblem good(problem);
  problem.expert_ids_TK[5] = 99;
  const DeviceProblem bad(problem);
  OneRank rank(cuda_config(problem.spec));
  const TestStream stream;
  const CallContext call = rank.layer.forward(bad.forward_input(), bad.forward_output(), stream);
  check(cudaStreamSynchronize(stream.get()), "a failing call");
  for (int repeat = 0; repeat < 2; ++repeat) {
    expect_error(ErrorCode::expert_id_out_of_range, {"expert_ids[2, 1] is 99", "0 to 7"},
                 [&] { rank.layer.forward(good.forward_input(), good.forward_output(), stream); });
  }
  expect_error(ErrorCode::expert_id_out_of_range, {"99"}, [&] { rank.layer.check(stream); });
  EXPECT_TRUE(same_bits(bad.y.download(), std::vector<bf16>(24 * 64, bf16{0xffff})));
  rank.layer.forward(good.forward_input(), good.forward_output(), stream);
  rank.layer.check(stream);
  // The weight gradients of a failed call stay as they were.
  rank.layer.backward(call, bad.backward_input(), bad.backward_output(), stream);
  expect_error(ErrorCode::invalid_argument, {"forward call", "failed"},
               [&] { rank.layer.check(stream); });
  EXPECT_TRUE(same_bits(bad.dup.download(), std::vector<bf16>(8 * 64 * 64, bf16{0xffff})));
}

}  // namespace
}  // namespace megamoe::verify
