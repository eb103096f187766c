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

#include "gpu/spawn_test.h"
#include "gpu/unchecked_calls.h"
#include "layer_fixture.h"
#include "megamoe/cuda.h"

namespace megamoe::verify {
namespace {

/// When rank 1 is killed; rank 0 runs the call that finds it gone.
constexpr const char* kBeforeABackward = "before a backward call that is checked";
constexpr const char* kBeforeAForward = "before forward calls that nobody checks";
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
  RankSession session(problem, {}, *group);
  for (int step = 0; step < 3; ++step) {
    const CallContext context = session.forward();
    if (killed != nullptr && step == 1) {
      if (rank == 0) return expect_killed_peer(session, *group, context, killed);
      if (std::string(killed) == kWhileCallsRun) {
        be_killed_after(std::chrono::milliseconds(500));
        run_until_one_throws(session);
      }
      raise(SIGKILL);
    }
    session.backward(context);
  }
  std::ofstream file(std::getenv("MEGAMOE_TEST_OUTPUT"), std::ios::binary);
  for (const RawTensor* tensor :
       {&session.tensors().y, &session.tensors().dx, &session.tensors().dup}) {
    file.write(reinterpret_cast<const char*>(tensor->bytes.data()),
               static_cast<std::streamsize>(tensor->bytes.size()));
  }
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

/// What both ranks have written: y, dx and dup.
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
  const Problem problem = make_problem(spec_with_tokens({40, 21}));
  std::vector<LayerTensors> wanted(2);
  run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
    const CallContext context = session.forward();
    session.backward(context);
    wanted[group.rank()] = session.tensors();
  });
  const std::vector<std::string> outputs = run_two_ranks("layer_test");
  for (int rank = 0; rank < 2; ++rank) {
    std::string bits;
    for (const RawTensor* tensor : {&wanted[rank].y, &wanted[rank].dx, &wanted[rank].dup}) {
      bits.append(reinterpret_cast<const char*>(tensor->bytes.data()), tensor->bytes.size());
    }
    EXPECT_TRUE(outputs[rank] == bits) << "rank " << rank;
  }
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
