// The layer of the CUDA backend over hosts that are processes: they see each other by NCCL's
// sockets on the loopback interface alone, as hosts with different NCCL_HOSTID do. It gives the
// bits of one host, and a host that goes is named.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/network/socket.h"
#include "gpu/held_memory.h"
#include "gpu/held_multiprocessors.h"
#include "gpu/hosts_ways.h"
#include "gpu/layer_device.h"
#include "gpu/spawn_test.h"
#include "hosts_scripts.h"
#include "megamoe/cuda.h"

namespace megamoe::verify {
namespace {

constexpr double kDeadlineS = 20.0;
/// What may pass from the moment that a peer is known to be gone, or late, to the error.
constexpr double kGraceS = 5.0;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}
int number(const char* name) { return std::atoi(variable(name).c_str()); }

/// The host that this process is, and its group: hosts x ranks of a host.
struct ThisHost {
  int host = number("MEGAMOE_TEST_HOST");
  Layout layout{2, number("MEGAMOE_TEST_RANKS_PER_HOST")};

  /// Runs `rank_main` on a thread a rank of this host.
  void run(const std::function<void(Communicator&)>& rank_main) const {
    std::vector<std::thread> threads;
    for (int index = 0; index < layout.ranks_per_host; ++index) {
      threads.emplace_back([&, index] {
        try {
          const auto group =
              make_network_communicator({.rank = host * layout.ranks_per_host + index,
                                         .num_ranks = layout.num_ranks(),
                                         .rendezvous = variable("MEGAMOE_TEST_RENDEZVOUS"),
                                         .host_name = "host " + std::to_string(host)},
                                        60.0);
          rank_main(*group);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "host %d, rank %d of it: %s\n", host, index, error.what());
          std::fflush(nullptr);
          _exit(9);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

/// On the devices of the host that a rank of `group` is on.
RunOptions options_of(Communicator& group) {
  RunOptions options;
  options.group = &group;
  return options;
}

/// In one host's process; not tests of their own.
TEST(HostProcess, DISABLED_Cases) {
  const ThisHost host;
  const int num_ranks = host.layout.num_ranks();
  const std::vector<Case> cases = all_cases();
  std::vector<Problem> problems;
  std::vector<LayerTensors> one_rank;
  for (const Case& test : cases) {
    problems.push_back(test.problem(num_ranks));
    one_rank.push_back(result_of_one_rank(problems.back(), test.options));
  }
  std::mutex mutex;
  host.run([&](Communicator& group) {
    for (const RunOptions& way : ways_of(options_of(group))) {
      const BackendGroup joined(group, way);  // NCCL takes its time
      for (std::size_t i = 0; i < cases.size(); ++i) {
        RunOptions options = cases[i].options;
        options.group = &group;
        options.overlap = way.overlap;
        options.deadline_s = kDeadlineS;
        const LayerConfig config = layer_config(problems[i].spec, options);
        Workspace workspace(config, joined.get());
        MoeLayer layer(config, joined.get(), workspace);
        RankData data(problems[i], options, group.rank());
        data.backward(layer, data.forward(layer));
        const LayerTensors expected = part_of(one_rank[i], problems[i].spec, group.rank());
        const std::string different = differing_tensors(data.tensors(), expected);
        const std::lock_guard lock(mutex);
        EXPECT_EQ(different, "") << cases[i].name << ", " << way_text(way) << ", rank "
                                 << group.rank();
      }
    }
    group.barrier("the end", 60.0);
  });
}

/// Calls in other orders.
TEST(HostProcess, DISABLED_Scripts) {
  const ThisHost host;
  const std::vector<Script> scripts = all_scripts();
  std::vector<std::vector<Problem>> problems;
  std::vector<std::vector<LayerTensors>> one_rank;
  for (const Script& script : scripts) {
    problems.push_back(script.problems(host.layout.num_ranks()));
    one_rank.push_back(script_on_one_rank(script, problems.back()));
  }
  std::mutex mutex;
  host.run([&](Communicator& group) {
    for (const RunOptions& way : ways_of(options_of(group))) {
      const BackendGroup joined(group, way);
      for (std::size_t i = 0; i < scripts.size(); ++i) {
        RunOptions options = scripts[i].options;
        options.group = &group;
        options.overlap = way.overlap;
        options.deadline_s = kDeadlineS;
        const auto tensors = run_script(scripts[i], problems[i], options, joined.get());
        for (std::size_t j = 0; j < tensors.size(); ++j) {
          const LayerTensors expected = part_of(one_rank[i][j], problems[i][j].spec, group.rank());
          const std::string different = differing_tensors(tensors[j], expected);
          const std::lock_guard lock(mutex);
          EXPECT_EQ(different, "") << scripts[i].name << ", problem " << j << ", " << way_text(way)
                                   << ", rank " << group.rank();
        }
      }
    }
    group.barrier("the end", 60.0);
  });
}

TEST(HostProcess, DISABLED_Refusals) {
  const ThisHost host;
  std::mutex mutex;
  host.run([&](Communicator& group) {
    RunOptions options = options_of(group);
    options.deadline_s = kDeadlineS;
    const BackendGroup joined(group, options);
    for (const Refusal& refusal : kRefusals) {
      const std::string wrong = refusal.run({joined.get(), options});
      const std::lock_guard lock(mutex);
      EXPECT_EQ(wrong, "") << refusal.name << ", rank " << group.rank();
    }
    group.barrier("the end", 60.0);
  });
}

/// More rows than 2^31 elements, among those that travel and those of a rank's experts. Tokens
/// repeat the first 64 of their rank, so rows of results must have the bits of a small call's.
TEST(HostProcess, DISABLED_ManyRows) {
  const ThisHost host;
  constexpr std::int64_t kTokens = 40000, kHidden = 7168, kSmall = 64;
  ProblemSpec spec = spec_of({kSmall, kSmall}, 8, 8);
  spec.hidden_dim = kHidden;
  const Problem small = make_problem(spec);
  const LayerTensors one_rank = result_of_one_rank(small, {});
  const LayerTensors expected = part_of(one_rank, spec, host.host);

  // This rank's tokens and experts.
  Problem large = small;
  large.spec.tokens_per_rank = {kTokens};
  large.spec.num_experts = spec.num_experts / 2;
  const auto repeat = [&](auto& values, std::int64_t width) {
    auto repeated = values;
    repeated.resize(kTokens * width);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const std::int64_t from = host.host * kSmall + t % kSmall;
      std::copy_n(&values[from * width], width, &repeated[t * width]);
    }
    values = std::move(repeated);
  };
  repeat(large.x_TH, kHidden);
  repeat(large.dy_TH, kHidden);
  repeat(large.expert_ids_TK, spec.top_k);
  repeat(large.weights_TK, spec.top_k);
  for (std::vector<bf16>* weights : {&large.gate_EIH, &large.up_EIH, &large.down_EHI}) {
    const auto half = static_cast<std::ptrdiff_t>(weights->size() / 2);
    weights->assign(weights->begin() + host.host * half, weights->begin() + (host.host + 1) * half);
  }
  const DeviceProblem tensors(large);

  host.run([&](Communicator& group) {
    const RunOptions options = options_of(group);
    const BackendGroup joined(group, options);
    spec.tokens_per_rank = {kTokens, kTokens};
    LayerConfig config = layer_config(spec, options);
    config.row_capacity = kTokens * spec.top_k + 4096;
    Workspace workspace(config, joined.get());
    MoeLayer layer(config, joined.get(), workspace);
    const TestStream stream;
    const CallContext call =
        layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
    layer.backward(call, tensors.backward_input(), tensors.backward_output(), stream);
    layer.check(stream);
    group.barrier("the end", 60.0);
  });
  const auto expect_rows = [&](const OnDevice<bf16>& all, const RawTensor& wanted) {
    for (const std::int64_t first : {std::int64_t{0}, std::int64_t{19968}, kTokens - kSmall}) {
      const std::vector<bf16> rows = all.download(first * kHidden, kSmall * kHidden);
      EXPECT_EQ(std::memcmp(rows.data(), wanted.bytes.data(), wanted.bytes.size()), 0) << first;
    }
  };
  expect_rows(tensors.y, expected.y);
  expect_rows(tensors.dx, expected.dx);
}

/// While a kernel of another stream holds many multiprocessors of the first host's device, all but
/// what NCCL's kernels and a product's clusters of each of its ranks need.
TEST(HostProcess, DISABLED_HeldMultiprocessors) {
  const ThisHost host;
  ProblemSpec spec = spec_of(tokens(host.layout.num_ranks(), {700}), 8, 4);
  spec.hidden_dim = 512;
  spec.intermediate_dim = 256;
  const Problem problem = make_problem(spec);
  const LayerTensors one_rank = result_of_one_rank(problem, {});
  host.run([&](Communicator& group) {
    RunOptions options = options_of(group);
    options.deadline_s = 10.0;
    RankSession session(problem, options, group);
    const LayerTensors expected = part_of(one_rank, problem.spec, group.rank());
    const int device = cuda_device_of(group.topology(), group.rank());
    const cuda::CurrentDevice current(device);
    const int all = multiprocessors_of(device);
    session.backward(session.forward());
    for (const int held : {all - 32 * host.layout.ranks_per_host, all / 2}) {
      std::optional<HeldMultiprocessors> kernel;
      if (group.rank() == 0) kernel.emplace(held);
      group.barrier("multiprocessors are held", 60.0);
      session.backward(session.forward());
      EXPECT_EQ(differing_tensors(session.tensors(), expected), "") << held << " held";
      group.barrier("all steps are done", 60.0);
    }
  });
}

/// Of many tokens, so that results travel in several pieces and groups overlap.
TEST(HostProcess, DISABLED_ManyTokens) {
  const ThisHost host;
  ProblemSpec spec = spec_of(tokens(host.layout.num_ranks(), {1500, 1100}), 16, 8);
  spec.hidden_dim = 2048;
  spec.intermediate_dim = 256;
  const Problem problem = make_problem(spec);
  const LayerTensors one_rank = result_of_one_rank(problem, {});
  std::mutex mutex;
  host.run([&](Communicator& group) {
    const LayerTensors expected = part_of(one_rank, problem.spec, group.rank());
    for (const RunOptions& way : ways_of(options_of(group))) {
      RankSession session(problem, way, group);
      for (int i = 0; i < 3; ++i) {
        session.backward(session.forward());
        const std::string different = differing_tensors(session.tensors(), expected);
        const std::lock_guard lock(mutex);
        EXPECT_EQ(different, "") << way_text(way) << ", rank " << group.rank();
      }
    }
    group.barrier("the end", 60.0);
  });
}

TEST(HostProcess, DISABLED_ManySteps) {
  const ThisHost host;
  const Problem problem = make_problem(spec_of(tokens(host.layout.num_ranks(), {30, 1, 47})));
  const LayerTensors one_rank = result_of_one_rank(problem, {});
  const int num_steps = number("MEGAMOE_TEST_STEPS");
  std::mutex mutex;
  host.run([&](Communicator& group) {
    const LayerTensors expected = part_of(one_rank, problem.spec, group.rank());
    RankSession session(problem, options_of(group), group);
    for (int step = 0; step < num_steps; ++step) {
      session.backward(session.forward());
      const std::string different = differing_tensors(session.tensors(), expected);
      const std::lock_guard lock(mutex);
      ASSERT_EQ(different, "") << "step " << step << ", rank " << group.rank();
    }
    group.barrier("the end", 60.0);
  });
}

/// Any moment of what the rank does then.
void raise_after(std::chrono::milliseconds delay, int signal) {
  std::thread([delay, signal] {
    std::this_thread::sleep_for(delay);
    raise(signal);
  }).detach();
}

/// Whether `error` says that one of the first host's ranks is not there, and not this rank's own
/// name.
bool names_the_first(const Error& error, const ThisHost& host) {
  bool names_it = false;
  for (int rank = 0; rank < host.layout.ranks_per_host; ++rank) {
    names_it = names_it ||
               std::string(error.what()).find("rank " + std::to_string(rank)) != std::string::npos;
  }
  return names_it;
}

/// The end of a process whose ranks, all of them but this one by now, have lost a peer: what is
/// shared with a dead one is not taken apart.
void end_process(bool is_right, std::atomic<int>& num_running) {
  if (!is_right) _exit(1);
  if (--num_running == 0) _exit(0);
  for (;;) pause();
}

/// What a rank throws, and after how long; told where the test's output goes.
struct Outcome {
  Error error{ErrorCode::internal, "no error"};
  double seconds = 0.0;
};
Outcome outcome_on(Communicator& group, const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  const std::optional<Error> error = error_of(work);
  Outcome outcome;
  if (error) outcome.error = *error;
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::fprintf(stderr, "rank %d after %.1f s: %s\n", group.rank(), outcome.seconds,
               outcome.error.what());
  return outcome;
}

/// The first host's process is killed, or stops, in the middle of training; the other one's ranks
/// must say so. Of two, the second may learn it from the first.
TEST(HostProcess, DISABLED_LosesTheFirst) {
  const ThisHost host;
  const bool stalls = variable("MEGAMOE_TEST_STALLS") == "1";
  const int ranks_per_host = host.layout.ranks_per_host;
  const Problem problem = make_problem(spec_of(tokens(host.layout.num_ranks(), {30, 47})));
  std::atomic<int> num_running{ranks_per_host};
  host.run([&](Communicator& group) {
    RunOptions options = options_of(group);
    options.deadline_s = stalls ? 3.0 : 60.0;
    constexpr std::chrono::milliseconds kDelay(1500);
    constexpr double kDelayS = std::chrono::duration<double>(kDelay).count();
    RankSession session(problem, options, group);
    if (group.rank() == 0) raise_after(kDelay, stalls ? SIGSTOP : SIGKILL);
    const Outcome outcome = outcome_on(group, [&] {
      for (int step = 0; step < 100'000; ++step) session.backward(session.forward());
    });
    const bool is_late = outcome.error.code() == ErrorCode::deadline_exceeded;
    const bool is_failed = outcome.error.code() == ErrorCode::peer_failed;
    const bool is_code = stalls ? is_late || (is_failed && ranks_per_host > 1) : is_failed;
    const bool is_in_time =
        outcome.seconds < kDelayS + (stalls ? options.deadline_s : 0.0) + kGraceS;
    end_process(is_code && is_in_time && names_the_first(outcome.error, host), num_running);
  });
}

/// It is killed while a communicator is made; not the first, which waits for CUDA more than for
/// NCCL.
TEST(HostProcess, DISABLED_LosesTheFirstWhileTheyJoin) {
  const ThisHost host;
  std::atomic<int> num_running{host.layout.ranks_per_host};
  host.run([&](Communicator& group) {
    { const BackendGroup first(group, options_of(group)); }
    group.barrier("all are there", 60.0);
    const std::chrono::milliseconds delay(number("MEGAMOE_TEST_KILLED_AFTER_MS"));
    if (group.rank() == 0) raise_after(delay, SIGKILL);
    const Outcome outcome = outcome_on(group, [&] {
      for (;;) const BackendGroup joined(group, options_of(group));
    });
    end_process(outcome.error.code() == ErrorCode::peer_failed &&
                    names_the_first(outcome.error, host) &&
                    outcome.seconds < std::chrono::duration<double>(delay).count() + kGraceS,
                num_running);
  });
}

/// The first host's rank has no memory to join with; it knows why, and the other one hears of it.
TEST(HostProcess, DISABLED_TheFirstFailsAlone) {
  const ThisHost host;
  host.run([&](Communicator& group) {
    std::optional<HeldMemory> held;
    if (group.rank() == 0) held.emplace(0, 1 << 20);
    group.barrier("all are there", 60.0);
    const Outcome outcome =
        outcome_on(group, [&] { const BackendGroup joined(group, options_of(group)); });
    const bool is_right = group.rank() == 0 ? outcome.error.code() != ErrorCode::peer_failed
                                            : names_the_first(outcome.error, host);
    if (!is_right || outcome.seconds >= 30.0) _exit(1);
  });
}

/// Two hosts, a process each, and the devices that each sees.
struct TwoHosts {
  const char* name;
  int ranks_per_host;
  const char* devices[2];
  int num_devices;     ///< that this needs
  bool share_devices;  ///< processes that do take turns: everything takes many times as long
};
void PrintTo(const TwoHosts& layout, std::ostream* out) { *out << layout.name; }

constexpr TwoHosts kARankEach{"ARankEach", 1, {"0", "1"}, 2, false};
constexpr TwoHosts kTwoOnADevice{"TwoOnADevice", 2, {"0", "1"}, 2, false};
/// The ranks of a host meet in windows.
constexpr TwoHosts kTwoOnTwoDevices{"TwoOnTwoDevices", 2, {"0,1", "1,0"}, 2, true};
constexpr TwoHosts kOnOneDevice{"OnOneDevice", 1, {"0", "0"}, 1, true};

/// Rank 0 listens there, so nobody does any more.
std::string free_address() {
  const network::Socket socket = network::listen_on({"127.0.0.1", 0});
  return "127.0.0.1:" + std::to_string(network::port_of(socket));
}

class HostProcesses {
 public:
  HostProcesses(const char* test, const TwoHosts& hosts) {
    set("MEGAMOE_TEST_RENDEZVOUS", free_address());
    set("MEGAMOE_TEST_RANKS_PER_HOST", std::to_string(hosts.ranks_per_host));
    set("NCCL_SOCKET_IFNAME", "lo");
    set("NCCL_NET", "Socket");
    set("NCCL_IB_DISABLE", "1");
    set("NCCL_NVLS_ENABLE", "0");
    for (int host = 0; host < 2; ++host) {
      set("MEGAMOE_TEST_HOST", std::to_string(host));
      set("NCCL_HOSTID", "stand-in-" + std::to_string(host));
      set("CUDA_VISIBLE_DEVICES", hosts.devices[host]);
      processes_.push_back(spawn_test(std::string("HostProcess.") + test));
    }
    for (const std::string& name : set_) unsetenv(name.c_str());
  }
  HostProcesses(const HostProcesses&) = delete;
  HostProcesses& operator=(const HostProcesses&) = delete;
  ~HostProcesses() {
    for (const pid_t process : processes_) {
      if (process == 0) continue;
      kill(process, SIGKILL);
      waitpid(process, nullptr, 0);
    }
  }

  /// The wait status of a host's process, which is killed where it does not end in time.
  int status_of(int host, double deadline_s) {
    const auto start = std::chrono::steady_clock::now();
    int status = -1;
    while (waitpid(processes_[host], &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() - start > std::chrono::duration<double>(deadline_s)) {
        ADD_FAILURE() << "host " << host << " did not end in " << deadline_s << " s";
        return -1;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    processes_[host] = 0;
    return status;
  }

 private:
  void set(const char* name, const std::string& value) {
    setenv(name, value.c_str(), 1);
    set_.emplace_back(name);
  }

  std::vector<std::string> set_;
  std::vector<pid_t> processes_;
};

class ProcessesOfHosts : public testing::TestWithParam<TwoHosts> {
 protected:
  void SetUp() override {
    if (num_cuda_devices() < GetParam().num_devices) GTEST_SKIP() << "needs two devices";
  }
};

void expect_both_succeed(const char* test, const TwoHosts& layout, double deadline_s) {
  if (num_cuda_devices() < layout.num_devices) GTEST_SKIP() << "needs two devices";
  HostProcesses hosts(test, layout);
  for (int host = 0; host < 2; ++host) {
    EXPECT_EQ(hosts.status_of(host, deadline_s), 0) << "host " << host;
  }
}

TEST_P(ProcessesOfHosts, GiveTheBitsOfOneHost) {
  expect_both_succeed("DISABLED_Cases", GetParam(), 150.0);
}
TEST_P(ProcessesOfHosts, GiveTheBitsOfOneHostWithManyTokens) {
  expect_both_succeed("DISABLED_ManyTokens", GetParam(), 60.0);
}
TEST_P(ProcessesOfHosts, GiveTheBitsOfOneHostInAnyOrderOfCalls) {
  expect_both_succeed("DISABLED_Scripts", GetParam(), 100.0);
}
TEST_P(ProcessesOfHosts, RefuseWhatIsWrongAndStayUsable) {
  expect_both_succeed("DISABLED_Refusals", GetParam(), 60.0);
}
TEST_P(ProcessesOfHosts, TheSameStepAgainAndAgain) {
  setenv("MEGAMOE_TEST_STEPS", GetParam().share_devices ? "50" : "1000", 1);
  expect_both_succeed("DISABLED_ManySteps", GetParam(), 100.0);
  unsetenv("MEGAMOE_TEST_STEPS");
}

TEST_P(ProcessesOfHosts, AKilledHostIsNamed) {
  HostProcesses hosts("DISABLED_LosesTheFirst", GetParam());
  EXPECT_EQ(hosts.status_of(1, 60.0), 0);
  EXPECT_TRUE(WIFSIGNALED(hosts.status_of(0, 5.0)));
}

TEST_P(ProcessesOfHosts, AHostThatStopsIsNamedAtTheDeadline) {
  setenv("MEGAMOE_TEST_STALLS", "1", 1);
  HostProcesses hosts("DISABLED_LosesTheFirst", GetParam());
  unsetenv("MEGAMOE_TEST_STALLS");
  EXPECT_EQ(hosts.status_of(1, 60.0), 0);
}

TEST_P(ProcessesOfHosts, AHostThatIsKilledWhileTheyJoinIsNamed) {
  for (const char* delay_ms : {"200", "500", "800"}) {
    SCOPED_TRACE(delay_ms);
    setenv("MEGAMOE_TEST_KILLED_AFTER_MS", delay_ms, 1);
    HostProcesses hosts("DISABLED_LosesTheFirstWhileTheyJoin", GetParam());
    EXPECT_EQ(hosts.status_of(1, 60.0), 0);
    EXPECT_TRUE(WIFSIGNALED(hosts.status_of(0, 5.0)));
  }
  unsetenv("MEGAMOE_TEST_KILLED_AFTER_MS");
}

TEST(ProcessesOfHostsOfARank, OffsetsPassTwoToThe31Elements) {
  std::size_t free = 0, total = 0;
  cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (free < std::size_t{60} << 30) GTEST_SKIP() << "needs 60 GB of memory of each device";
  expect_both_succeed("DISABLED_ManyRows", kARankEach, 100.0);
}

TEST(ProcessesOfHostsWithADevice, HeldMultiprocessorsDoNotKeepCallsFromTheirEnd) {
  for (const TwoHosts& layout : {kARankEach, kTwoOnADevice}) {
    SCOPED_TRACE(layout.name);
    expect_both_succeed("DISABLED_HeldMultiprocessors", layout, 60.0);
  }
}

TEST(ProcessesOfHostsOfARank, ARankThatCannotJoinIsNamed) {
  expect_both_succeed("DISABLED_TheFirstFailsAlone", kARankEach, 60.0);
}

INSTANTIATE_TEST_SUITE_P(RanksOfAHost, ProcessesOfHosts,
                         testing::Values(kOnOneDevice, kARankEach, kTwoOnADevice, kTwoOnTwoDevices),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace megamoe::verify
