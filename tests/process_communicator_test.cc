// Ranks as processes: the same contract as threads, and processes that die.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "megamoe/communicator.h"
#include "megamoe/error.h"
#include "megamoe/layer.h"
#include "process_fixture.h"

namespace megamoe {
namespace {

constexpr double kDeadline = 30.0;

std::size_t segments_of_this_test() {
  const std::string prefix = "megamoe.test." + std::to_string(getpid());
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.path().filename().string().rfind(prefix, 0) == 0) ++count;
  }
  return count;
}

TEST(ProcessCommunicator, GathersSumsAndSharesMemory) {
  expect_all_succeed(run_processes(3, [](const std::string& name, int rank) {
    const auto group = make_process_communicator(name, rank, 3, kDeadline);
    for (int round = 0; round < 100; ++round) {
      const int mine = 10 * round + rank;
      int all[3] = {};
      group->all_gather(&mine, all, sizeof(int), "test", kDeadline);
      for (int peer = 0; peer < 3; ++peer) expect(all[peer] == 10 * round + peer, "gather");
    }
    // Larger than a mailbox, and not a multiple of it.
    std::vector<float> values(200'003, static_cast<float>(rank + 1));
    values[200'002] = 0.5F;
    group->all_reduce_sum(values.data(), values.size(), "test", kDeadline);
    expect(values[0] == 6.0F && values[150'000] == 6.0F && values[200'002] == 1.5F, "sum");
    std::vector<char> large(700'001, static_cast<char>('a' + rank));
    std::vector<char> all(3 * large.size());
    group->all_gather(large.data(), all.data(), large.size(), "test", kDeadline);
    for (int peer = 0; peer < 3; ++peer) {
      expect(all[peer * large.size() + large.size() - 1] == 'a' + peer, "large gather");
    }
    for (int round = 0; round < 20; ++round) {
      const auto heap = group->allocate_symmetric(100, kDeadline);
      expect(heap->peer(rank)[7] == std::byte{0}, "zeroed");
      group->barrier("reads", kDeadline);
      heap->peer((rank + 1) % 3)[7] = static_cast<std::byte>(rank + 1);
      group->barrier("writes", kDeadline);
      expect(heap->peer(rank)[7] == static_cast<std::byte>((rank + 2) % 3 + 1), "peer write");
      group->barrier("checks", kDeadline);
    }
  }));
  EXPECT_EQ(segments_of_this_test(), 0U);
}

TEST(ProcessCommunicator, AKilledProcessIsNamedWithinAMoment) {
  const auto statuses = run_processes(3, [](const std::string& name, int rank) {
    const auto group = make_process_communicator(name, rank, 3, kDeadline);
    if (rank == 1) raise(SIGKILL);
    const Error error = error_of([&] { group->barrier("the next step", kDeadline); });
    expect(error.code() == ErrorCode::peer_failed, "code");
    expect(contains(error, "rank 1") && contains(error, "without a word"), error.what());
  });
  EXPECT_TRUE(WIFSIGNALED(statuses[1]));
  EXPECT_EQ(statuses[0], 0);
  EXPECT_EQ(statuses[2], 0);
  EXPECT_EQ(segments_of_this_test(), 0U);
}

TEST(ProcessCommunicator, AbortCarriesTheReason) {
  expect_all_succeed(run_processes(2, [](const std::string& name, int rank) {
    const auto group = make_process_communicator(name, rank, 2, kDeadline);
    if (rank == 0) return group->abort("disk full");
    const Error error = error_of([&] { group->barrier("anything", kDeadline); });
    expect(error.code() == ErrorCode::peer_failed && contains(error, "disk full"), error.what());
  }));
}

TEST(ProcessCommunicator, ProcessesInDifferentCallsLearnWhereEachIs) {
  expect_all_succeed(run_processes(2, [](const std::string& name, int rank) {
    const auto group = make_process_communicator(name, rank, 2, kDeadline);
    for (int round = 0; round < 5; ++round) {
      const auto expect_mismatch = [&](const char* text, auto first, auto second) {
        const Error error = error_of([&] { rank == 0 ? first() : second(); });
        expect(error.code() == ErrorCode::config_mismatch && contains(error, text), error.what());
        // The group is still usable, and gathers what was sent.
        const int mine = 10 * round + rank;
        int all[2] = {};
        group->all_gather(&mine, all, sizeof(int), "test", kDeadline);
        expect(all[0] == 10 * round && all[1] == 10 * round + 1, "gather");
      };
      std::vector<int> data(100);
      const auto barrier = [&] { group->barrier("a barrier here", kDeadline); };
      const auto gather = [&] { group->all_gather(&data[50], data.data(), 8, "g", kDeadline); };
      const auto longer = [&] { group->all_gather(&data[50], data.data(), 12, "g", kDeadline); };
      const auto heap = [&] { group->allocate_symmetric(64, kDeadline); };
      const auto larger_heap = [&] { group->allocate_symmetric(65, kDeadline); };
      expect_mismatch("rank 1 at a barrier here", gather, barrier);
      expect_mismatch("rank 1 at g (a gather of 12 bytes)", gather, longer);
      expect_mismatch("rank 0 is at the allocation", heap, barrier);
      expect_mismatch("rank 1 at the allocation of a symmetric heap of 65", heap, larger_heap);
      heap();
    }
  }));
  EXPECT_EQ(segments_of_this_test(), 0U);
}

TEST(ProcessCommunicator, AMissingProcessIsADeadlineThatNamesIt) {
  expect_all_succeed(run_processes(1, [](const std::string& name, int rank) {
    const Error error = error_of([&] { make_process_communicator(name, rank, 2, 0.2); });
    expect(error.code() == ErrorCode::deadline_exceeded, "code");
    expect(contains(error, "missing: rank 1"), error.what());
  }));
  EXPECT_EQ(segments_of_this_test(), 0U);
}

TEST(ProcessCommunicator, WrongArgumentsAreNamed) {
  const auto message = [](const std::string& name, int rank, int num_ranks,
                          double deadline_s = 0.1) {
    return std::string(
        error_of([&] { make_process_communicator(name, rank, num_ranks, deadline_s); }).what());
  };
  EXPECT_NE(message("a/b", 0, 1).find("name"), std::string::npos);
  EXPECT_NE(message("", 0, 1).find("name"), std::string::npos);
  EXPECT_NE(message("ok", 2, 2).find("rank is 2"), std::string::npos);
  EXPECT_NE(message("ok", 0, 0).find("num_ranks is 0"), std::string::npos);
  EXPECT_NE(message("ok", 0, 1, -1.0).find("deadline_s is -1.000000 s, must be positive"),
            std::string::npos);
}

TEST(ProcessCommunicator, ARankThatJoinsTwiceIsRefused) {
  expect_all_succeed(run_processes(1, [](const std::string& name, int /*rank*/) {
    std::thread first([&] {
      const Error error = error_of([&] { make_process_communicator(name, 0, 2, 2.0); });
      expect(error.code() == ErrorCode::deadline_exceeded, error.what());
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const Error error = error_of([&] { make_process_communicator(name, 0, 2, 2.0); });
    expect(error.code() == ErrorCode::invalid_argument && contains(error, "joined already"),
           error.what());
    first.join();
  }));
}

/// The layer on processes gives the bits that it gives on threads.
std::vector<bf16> layer_output(Communicator& group) {
  LayerConfig config;
  config.shape = {6, 16, 24, 4, 2};
  config.num_threads = 1;
  Workspace workspace(config, group);
  MoeLayer layer(config, group, workspace);
  const auto number = [](std::int64_t i) {
    return to_bf16(static_cast<float>((i * 37 + 11) % 61) / 31.0F - 1.0F);
  };
  const std::int64_t e = 4 / group.size();
  std::vector<bf16> x(6 * 16);
  std::vector<bf16> weights(e * 24 * 16);
  std::vector<std::int32_t> ids(12);
  std::vector<float> slot_weights(12, 0.5F);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = number(i + 1000 * group.rank());
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = number(i + 7 * group.rank());
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 5 % 4);
  std::vector<bf16> y(x.size());
  const bf16* w = weights.data();
  const ExpertWeights experts{tensor_view(w, {e, 24, 16}), tensor_view(w, {e, 24, 16}),
                              tensor_view(w, {e, 16, 24})};
  const bf16* x_data = x.data();
  const std::int32_t* ids_data = ids.data();
  const float* weights_data = slot_weights.data();
  layer.forward({tensor_view(x_data, {6, 16}), tensor_view(ids_data, {6, 2}),
                 tensor_view(weights_data, {6, 2}), experts},
                {tensor_view(y.data(), {6, 16})});
  return y;
}

TEST(ProcessCommunicator, TheLayerGivesTheBitsOfThreads) {
  std::vector<std::vector<bf16>> expected(2);
  run_ranks(2, [&](Communicator& group) { expected[group.rank()] = layer_output(group); });
  expect_all_succeed(run_processes(2, [&](const std::string& name, int rank) {
    const auto group = make_process_communicator(name, rank, 2, kDeadline);
    const std::vector<bf16> y = layer_output(*group);
    for (std::size_t i = 0; i < y.size(); ++i) {
      expect(y[i].bits == expected[rank][i].bits, "equal bits");
    }
    group->barrier("the end", kDeadline);
  }));
}

TEST(ProcessCommunicator, AKilledProcessFailsTheStepsOfTheOthers) {
  const auto statuses = run_processes(2, [](const std::string& name, int rank) {
    const auto group = make_process_communicator(name, rank, 2, kDeadline);
    const auto start = std::chrono::steady_clock::now();
    const Error error = error_of([&] {
      for (int step = 0; step < 1'000'000; ++step) {
        if (rank == 1 && step == 20) raise(SIGKILL);
        layer_output(*group);
      }
    });
    expect(error.code() == ErrorCode::peer_failed && contains(error, "rank 1"), error.what());
    expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(20),
           "long before 600 s");
  });
  EXPECT_TRUE(WIFSIGNALED(statuses[1]));
  EXPECT_EQ(statuses[0], 0);
}

TEST(ProcessCommunicator, AProcessThatIsDoneMayLeaveWhileOthersStillWork) {
  for (int repeat = 0; repeat < 5; ++repeat) {
    expect_all_succeed(run_processes(4, [&](const std::string& name, int rank) {
      const auto group = make_process_communicator(name, rank, 4, kDeadline);
      for (int step = 0; step < 5; ++step) layer_output(*group);
    }));
  }
}

}  // namespace
}  // namespace megamoe
