// Ranks as processes with a device each.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <regex>
#include <thread>

#include "gpu/behind_rows.h"
#include "gpu/beside_dx.h"
#include "gpu/spawn_test.h"
#include "gpu/unchecked_calls.h"
#include "layer/workspace.h"
#include "megamoe/cuda.h"

namespace megamoe::verify {
namespace {

/// When rank 1 is killed; rank 0 runs the call that finds it gone.
constexpr const char* kBeforeABackward = "before a backward call that is checked";
constexpr const char* kBeforeAForward = "before forward calls that nobody checks";
constexpr const char* kOnceItsRowsAreSent = "in a backward call, once its rows are sent";
constexpr const char* kWhileCallsRun = "while calls run";
constexpr const char* kWhileTheyJoin = "while they join";

void run_until_one_throws(RankSession& session) {
  for (;;) {
    const CallContext context = session.forward();
    session.backward(context);
  }
}

/// Meanwhile this process goes on.
void be_killed_after(std::chrono::milliseconds delay) {
  std::thread([delay] {
    std::this_thread::sleep_for(delay);
    raise(SIGKILL);
  }).detach();
}

/// Rank 0 must say that rank 1 has gone, wherever both were.
void expect_killed_peer_while_joining(Communicator& group) {
  alarm(40);
  { const BackendGroup first(group, {}); }  // which waits for CUDA more than for NCCL
  group.barrier("both are there", 60);
  const auto start = std::chrono::steady_clock::now();
  if (group.rank() == 1) {
    be_killed_after(std::chrono::milliseconds(std::atoi(std::getenv("MEGAMOE_TEST_DELAY_MS"))));
  }
  expect_error(ErrorCode::peer_failed, {"rank 1 has left (its process has ended without a word)"},
               [&] {
                 for (;;) const BackendGroup joined(group, {});
               });
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  EXPECT_LT(taken.count(), 20.0);  // the deadlines are 600 s
}

/// Rank 0 must say that rank 1 has gone, and which of its signals it has awaited in vain.
void expect_killed_peer(RankSession& session, Communicator& group, const CallContext& context,
                        const std::string& killed) {
  alarm(40);  // also where what is shared with a dead peer is taken apart
  const auto start = std::chrono::steady_clock::now();
  const std::string gone = "rank 1 has left (its process has ended without a word)";
  if (killed == kWhileCallsRun) {
    const std::optional<Error> error = error_of([&] { run_until_one_throws(session); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::peer_failed);
    const std::regex awaited(
        "rank 0 waited for (the entry into the call|staged rows|activation gradients|expert "
        "outputs) of rank 1 in call [0-9]+ \\(last seen in call [0-9]+\\)");
    EXPECT_TRUE(std::regex_search(error->what(), awaited)) << error->what();
    EXPECT_NE(std::string(error->what()).find(gone), std::string::npos) << error->what();
  } else if (killed == kOnceItsRowsAreSent) {
    expect_error(
        ErrorCode::peer_failed,
        {"rank 0 waited for expert outputs of rank 1 in call 4 (last seen in call 3)", gone},
        [&] { session.backward(context); });
  } else {
    // Both ranks have made three calls: forward, backward, forward.
    const std::string awaited =
        "rank 0 waited for the entry into the call of rank 1 in call 4 (last seen in call 3)";
    expect_error(ErrorCode::peer_failed, {awaited, gone}, [&] {
      if (killed == kBeforeABackward) session.backward(context);
      UncheckedCalls calls(session, group);
      for (;;) calls.forward();
    });
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  EXPECT_LT(taken.count(), 10.0);  // the deadlines are 60 s
}

/// Rank 1 is killed in the second step, as `killed` says when.
void be_killed_or_expect_it(const Problem& problem, Communicator& group,
                            const std::string& killed) {
  RankSession session(problem, {}, group);
  session.backward(session.forward());
  const CallContext context = session.forward();
  if (group.rank() == 0) return expect_killed_peer(session, group, context, killed);
  if (killed == kWhileCallsRun) {
    be_killed_after(std::chrono::milliseconds(500));
    run_until_one_throws(session);
  }
  if (killed == kOnceItsRowsAreSent) {
    const OnceRowsAreSent dead(gradients_behind_rows(), [] { raise(SIGKILL); });
    session.backward(context);
  }
  raise(SIGKILL);
}

/// y, dx and dup after three steps in a workspace full of NaN.
std::string bits_of_steps(const Problem& problem, const RunOptions& options, Communicator& group) {
  const LayerConfig config = layer_config(problem.spec, options);
  Workspace workspace(config, group);
  MoeLayer layer(config, group, workspace);
  poison(workspace);
  group.barrier("poisoned", 60);
  RankData data(problem, options, group.rank());
  for (int step = 0; step < 3; ++step) data.backward(layer, data.forward(layer));
  std::string bits;
  for (const RawTensor* tensor : {&data.tensors().y, &data.tensors().dx, &data.tensors().dup}) {
    bits.append(reinterpret_cast<const char*>(tensor->bytes.data()), tensor->bytes.size());
  }
  group.barrier("all steps are done", 60);
  return bits;
}

/// Of a layer whose gradients follow dx, and of one where they begin beside it.
std::string bits_of_rank(Communicator& threads_or_processes) {
  const BackendGroup group(threads_or_processes, {});
  return bits_of_steps(make_problem(spec_with_tokens({40, 21})), {}, group.get()) +
         bits_of_steps(make_problem(spec_beside_dx(2, /*num_experts=*/2)), options_beside_dx(),
                       group.get());
}

/// The part of one process in the tests below; not a test of its own.
TEST(CudaProcessRank, DISABLED_Run) {
  const char* rank_text = std::getenv("MEGAMOE_TEST_RANK");
  ASSERT_NE(rank_text, nullptr);
  const int rank = std::atoi(rank_text);
  const auto group =
      make_process_communicator(std::getenv("MEGAMOE_TEST_GROUP"), rank, 2, /*deadline_s=*/60);
  const Problem problem = make_problem(spec_with_tokens({40, 21}));
  if (const char* refusal = std::getenv("MEGAMOE_TEST_REFUSAL"); refusal != nullptr) {
    expect_error(ErrorCode::unsupported, {refusal},
                 [&] { const RankSession session(problem, {}, *group); });
    return;
  }
  const char* killed = std::getenv("MEGAMOE_TEST_KILLED");
  if (killed != nullptr && std::string(killed) == kWhileTheyJoin) {
    return expect_killed_peer_while_joining(*group);
  }
  if (killed != nullptr) return be_killed_or_expect_it(problem, *group, killed);
  const std::string bits = bits_of_rank(*group);
  std::ofstream(std::getenv("MEGAMOE_TEST_OUTPUT"), std::ios::binary) << bits;
  group->barrier("both processes are done", 60);
}

std::string output_of(const std::string& group, int rank) {
  return "/tmp/" + group + "." + std::to_string(rank);
}

/// Starts the test above in two processes.
std::vector<pid_t> spawn_two_ranks(const std::string& group) {
  std::vector<pid_t> processes;
  for (int rank = 0; rank < 2; ++rank) {
    setenv("MEGAMOE_TEST_RANK", std::to_string(rank).c_str(), 1);
    setenv("MEGAMOE_TEST_GROUP", group.c_str(), 1);
    setenv("MEGAMOE_TEST_OUTPUT", output_of(group, rank).c_str(), 1);
    processes.push_back(spawn_test("CudaProcessRank.*"));
  }
  return processes;
}

/// What both ranks have written: bits_of_rank().
std::vector<std::string> run_two_ranks(const std::string& what) {
  const std::string group = what + "." + std::to_string(getpid());
  const std::vector<pid_t> processes = spawn_two_ranks(group);
  std::vector<std::string> outputs;
  for (int rank = 0; rank < 2; ++rank) {
    int status = -1;
    waitpid(processes[rank], &status, 0);
    EXPECT_EQ(status, 0) << "rank " << rank;
    const std::string output = output_of(group, rank);
    std::ifstream file(output, std::ios::binary);
    outputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    std::filesystem::remove(output);
  }
  return outputs;
}

/// Both ranks must refuse to start, in words that contain `text`.
void expect_refusal_of_processes(const char* variable, const char* value, const char* text) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  setenv("MEGAMOE_TEST_REFUSAL", text, 1);
  setenv(variable, value, 1);
  const std::vector<pid_t> processes = spawn_two_ranks("refusal_test." + std::to_string(getpid()));
  unsetenv("MEGAMOE_TEST_REFUSAL");
  unsetenv(variable);
  for (const pid_t process : processes) {
    int status = -1;
    waitpid(process, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

TEST(CudaProcesses, WithoutNcclAreRefused) {
  expect_refusal_of_processes("MEGAMOE_NCCL_LIBRARY", "/no/such/libnccl.so", "need NCCL 2.28.9");
}

TEST(CudaProcesses, WithoutCuMemAreRefused) {
  expect_refusal_of_processes("NCCL_CUMEM_ENABLE", "0", "cuMem");
}

/// One process is killed; the other must name it and what it waited for, and end.
void expect_killed_peer_is_named(const char* when) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  setenv("MEGAMOE_TEST_KILLED", when, 1);
  const std::vector<pid_t> processes = spawn_two_ranks("killed_test." + std::to_string(getpid()));
  unsetenv("MEGAMOE_TEST_KILLED");
  int status = -1;
  waitpid(processes[0], &status, 0);
  EXPECT_EQ(status, 0);
  waitpid(processes[1], &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
}

TEST(CudaProcesses, AKilledPeerIsNamedLongBeforeTheDeadlineOfABackwardCall) {
  expect_killed_peer_is_named(kBeforeABackward);
}

TEST(CudaProcesses, AKilledPeerIsNamedToALoopOfForwardCallsThatNeverChecks) {
  expect_killed_peer_is_named(kBeforeAForward);
}

TEST(CudaProcesses, APeerThatIsKilledInACallIsNamedWithWhatWasAwaited) {
  expect_killed_peer_is_named(kWhileCallsRun);
}

TEST(CudaProcesses, APeerThatIsKilledOnceItsRowsAreSentIsNamedWithWhatWasAwaited) {
  expect_killed_peer_is_named(kOnceItsRowsAreSent);
}

TEST(CudaProcesses, APeerThatIsKilledWhileTheyJoinIsNamed) {
  for (const char* delay_ms : {"200", "500", "800"}) {
    SCOPED_TRACE(delay_ms);
    setenv("MEGAMOE_TEST_DELAY_MS", delay_ms, 1);
    expect_killed_peer_is_named(kWhileTheyJoin);
  }
  unsetenv("MEGAMOE_TEST_DELAY_MS");
}

TEST(CudaProcesses, OneADeviceGiveTheBitsOfThreads) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  std::vector<std::string> wanted(2);
  run_ranks(2, [&](Communicator& threads) { wanted[threads.rank()] = bits_of_rank(threads); });
  EXPECT_TRUE(run_two_ranks("layer_test") == wanted);
}

/// Also what sanitizers run: under them ranks that are threads of a process did not end.
TEST(CudaProcesses, OneADeviceGiveTheSameBitsTwice) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  const std::vector<std::string> first = run_two_ranks("first_test");
  EXPECT_FALSE(first[0].empty());
  EXPECT_TRUE(run_two_ranks("second_test") == first);
}

}  // namespace
}  // namespace megamoe::verify
