// Ranks on several hosts: the contract of a communicator, as threads and as processes, and what
// happens when ranks or connections end.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <numeric>
#include <thread>

#include "comm/network/links.h"
#include "comm/network/network.h"
#include "comm/network/rendezvous.h"
#include "network_fixture.h"

namespace megamoe {
namespace {

constexpr double kDeadline = 30.0;

/// What the rank knows once so many have left, or after ten seconds.
std::vector<Departure> departures_of(Communicator& group, std::size_t num_ranks) {
  const auto start = std::chrono::steady_clock::now();
  while (group.departures().size() < num_ranks &&
         std::chrono::steady_clock::now() - start < std::chrono::seconds(10)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return group.departures();
}

void check_collectives(Communicator& group) {
  const int rank = group.rank();
  const int num_ranks = group.size();
  for (int round = 0; round < 100; ++round) {
    const int mine = 10 * round + rank;
    std::vector<int> all(num_ranks, -1);
    group.all_gather(&mine, all.data(), sizeof(int), "test", kDeadline);
    for (int peer = 0; peer < num_ranks; ++peer) expect(all[peer] == 10 * round + peer, "gather");
  }
  // Larger than the buffers of a connection.
  std::vector<char> large(3'000'001, static_cast<char>('a' + rank));
  std::vector<char> all(num_ranks * large.size());
  group.all_gather(large.data(), all.data(), large.size(), "test", kDeadline);
  for (int peer = 0; peer < num_ranks; ++peer) {
    expect(all[peer * large.size()] == 'a' + peer, "large gather, first");
    expect(all[(peer + 1) * large.size() - 1] == 'a' + peer, "large gather, last");
  }
  for (const std::size_t count : {0, 1, 3, 200'003}) {
    std::vector<float> values(count, static_cast<float>(rank + 1));
    group.all_reduce_sum(values.data(), count, "test", kDeadline);
    const auto sum = static_cast<float>(num_ranks * (num_ranks + 1) / 2);
    for (const float value : values) expect(value == sum, "sum");
  }
}

void check_heaps(Communicator& group) {
  const Topology topology = group.topology();
  const int rank = group.rank();
  for (int round = 0; round < 5; ++round) {
    const auto heap = group.allocate_symmetric(100, kDeadline);
    expect(heap->bytes() == 100, "bytes");
    for (int peer = 0; peer < group.size(); ++peer) {
      const bool shares = topology.reach(rank, peer) != Reach::network;
      expect((heap->peer(peer) != nullptr) == shares, "memory of this host only");
    }
    const int host = topology.host_of(rank);
    const int next =
        topology.rank_of(host, (topology.local_index_of(rank) + 1) % topology.ranks_per_host());
    expect(heap->peer(rank)[7] == std::byte{0}, "zeroed");
    group.barrier("reads", kDeadline);
    heap->peer(next)[7] = static_cast<std::byte>(rank + 1);
    group.barrier("writes", kDeadline);
    const int previous =
        topology.rank_of(host, (topology.local_index_of(rank) + topology.ranks_per_host() - 1) %
                                   topology.ranks_per_host());
    expect(heap->peer(rank)[7] == static_cast<std::byte>(previous + 1), "peer write");
    group.barrier("checks", kDeadline);
  }
}

/// Every rank sends each rank of another host rows 2, 0, 1 of a table, and a count of its own.
void check_transfers(Communicator& group) {
  const Topology topology = group.topology();
  constexpr std::int64_t kRowBytes = 70'001;
  std::vector<std::byte> table(3 * kRowBytes);
  for (std::size_t i = 0; i < table.size(); ++i) {
    table[i] = static_cast<std::byte>((i * 7 + group.rank() * 31) % 251);
  }
  const std::vector<std::int32_t> order = {2, 0, 1};
  std::vector<std::vector<std::byte>> received(group.size(), std::vector<std::byte>(table.size()));
  std::vector<std::array<RowSegment, 2>> sent_segments(group.size());
  std::vector<std::array<RowSegment, 2>> received_segments(group.size());
  std::vector<Message> sends;
  std::vector<Message> receives;
  for (int peer = 0; peer < group.size(); ++peer) {
    if (topology.reach(group.rank(), peer) != Reach::network) continue;
    sent_segments[peer] = {RowSegment{table.data(), kRowBytes, 0, nullptr},
                           RowSegment{table.data(), kRowBytes, 3, order.data()}};
    received_segments[peer] = {
        RowSegment{received[peer].data(), kRowBytes, 2, order.data()},
        RowSegment{received[peer].data() + kRowBytes, kRowBytes, 1, nullptr}};
    sends.push_back({peer, sent_segments[peer]});
    receives.push_back({peer, received_segments[peer]});
  }
  for (int round = 0; round < 3; ++round) {
    group.network()->transfer(sends, receives, "test", kDeadline);
  }
  for (const Message& message : receives) {
    const auto byte_of = [&](std::int64_t row, std::int64_t byte) {
      const auto i = static_cast<std::size_t>(row * kRowBytes + byte);
      return static_cast<std::byte>((i * 7 + message.peer * 31) % 251);
    };
    for (const std::int64_t byte : {std::int64_t{0}, kRowBytes / 2, kRowBytes - 1}) {
      const std::vector<std::byte>& got = received[message.peer];
      // Sent as rows 2, 0, 1; the first two went to rows 2 and 0, the last one to row 1.
      expect(got[2 * kRowBytes + byte] == byte_of(2, byte), "row 2");
      expect(got[0 * kRowBytes + byte] == byte_of(0, byte), "row 0");
      expect(got[1 * kRowBytes + byte] == byte_of(1, byte), "row 1");
    }
  }
}

class Layouts : public testing::TestWithParam<std::pair<int, int>> {
 protected:
  static Topology topology() { return even_topology(GetParam().first, GetParam().second); }
};

TEST_P(Layouts, ThreadsGatherSumShareAndTransfer) {
  run_ranks(topology(), [](Communicator& group) {
    check_collectives(group);
    check_heaps(group);
    check_transfers(group);
  });
}

TEST_P(Layouts, ProcessesGatherSumShareAndTransfer) {
  expect_all_succeed(run_network_processes(topology(), kDeadline, [](Communicator& group) {
    check_collectives(group);
    check_heaps(group);
    check_transfers(group);
    group.barrier("the end", kDeadline);
  }));
}

INSTANTIATE_TEST_SUITE_P(Hosts, Layouts,
                         testing::Values(std::pair{2, 1}, std::pair{2, 2}, std::pair{2, 4},
                                         std::pair{4, 2}, std::pair{3, 1}),
                         [](const auto& test) {
                           return std::to_string(test.param.first) + "x" +
                                  std::to_string(test.param.second);
                         });

TEST(NetworkCommunicator, SumsHaveTheBitsOfOneHost) {
  const auto sums = [](const Topology& topology) {
    std::vector<std::vector<float>> results(topology.num_ranks());
    run_ranks(topology, [&](Communicator& group) {
      std::vector<float> values(1003);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] =
            0.1F * static_cast<float>(i % 17) + 1e7F * static_cast<float>(group.rank() == 2);
      }
      group.all_reduce_sum(values.data(), values.size(), "test", kDeadline);
      results[group.rank()] = values;
    });
    return results;
  };
  EXPECT_EQ(sums(even_topology(2, 2)), sums(Topology(4)));
}

TEST(NetworkCommunicator, AGroupThatIsOnOneHostHasNoNetwork) {
  expect_all_succeed(run_network_processes(even_topology(1, 3), kDeadline, [](Communicator& group) {
    expect(group.network() == nullptr, "no network");
    check_collectives(group);
    check_heaps(group);
    group.barrier("the end", kDeadline);
  }));
}

TEST(NetworkCommunicator, RanksInDifferentCallsLearnWhereEachIs) {
  run_ranks(even_topology(2, 2), [](Communicator& group) {
    std::vector<int> data(300'000);
    const auto expect_mismatch = [&](auto usual, auto different, const char* text) {
      const Error error = error_of([&] { group.rank() == 2 ? different() : usual(); });
      EXPECT_EQ(error.code(), ErrorCode::config_mismatch);
      EXPECT_TRUE(contains(error, text)) << error.what();
      check_transfers(group);  // the group is still usable
    };
    const auto barrier = [&] { group.barrier("step 7", kDeadline); };
    const auto gather = [&] {
      group.all_gather(&data[200'000], data.data(), 200'000, "a gather", kDeadline);
    };
    const auto heap = [&] { group.allocate_symmetric(64, kDeadline); };
    expect_mismatch(barrier, gather, "rank 2 at a gather (a gather of 200000");
    expect_mismatch(gather, barrier, "rank 2 at step 7");
    expect_mismatch(heap, gather, "rank 0 is at the allocation");
  });
}

TEST(NetworkCommunicator, TransfersOfDifferentSizesAreRefused) {
  run_ranks(even_topology(2, 1), [](Communicator& group) {
    std::vector<std::byte> bytes(100);
    const RowSegment sent{bytes.data(), 10, 3, nullptr};
    const RowSegment received{bytes.data() + 50, 10, 4, nullptr};
    const Message send{1 - group.rank(), {&sent, 1}};
    const Message receive{1 - group.rank(), {&received, 1}};
    const Error error = error_of([&] {
      group.network()->transfer({&send, 1}, {&receive, 1}, "rows", kDeadline);
    });
    EXPECT_EQ(error.code(), ErrorCode::config_mismatch);
    EXPECT_TRUE(contains(error, "rows (a transfer of 40 bytes)")) << error.what();
    EXPECT_TRUE(contains(error, "rows (a transfer of 30 bytes)")) << error.what();
    group.barrier("the end", kDeadline);
  });
}

TEST(NetworkCommunicator, AKilledProcessIsNamedOnEveryHost) {
  const auto statuses =
      run_network_processes(even_topology(2, 2), kDeadline, [](Communicator& group) {
        if (group.rank() == 1) raise(SIGKILL);
        const auto start = std::chrono::steady_clock::now();
        const Error error = error_of([&] { group.barrier("the next step", kDeadline); });
        expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(4), "at once");
        expect(error.code() == ErrorCode::peer_failed, error.what());
        expect(contains(error, "rank 1") && contains(error, "without a word"), error.what());
        const Error again = error_of([&] { group.barrier("one more", kDeadline); });
        expect(again.code() == ErrorCode::peer_failed && contains(again, "rank 1"), again.what());
      });
  EXPECT_TRUE(WIFSIGNALED(statuses[1]));
  for (const int rank : {0, 2, 3}) EXPECT_EQ(statuses[rank], 0) << rank;
}

/// Killed while the group forms, when all are connected and the ranks of its host wait for it.
TEST(NetworkCommunicator, AProcessThatIsKilledBeforeItJoinsItsHostIsNamedAtOnce) {
  const Topology topology = even_topology(2, 2);
  const std::string rendezvous = free_rendezvous();
  const auto start = std::chrono::steady_clock::now();
  const auto statuses = run_processes(4, [&](const std::string& /*name*/, int rank) {
    if (rank == 2) {
      const network::Endpoint endpoint = network::parse_endpoint(rendezvous, "rendezvous");
      const network::Deadline deadline(kDeadline);
      const network::Membership membership = network::meet_at(
          endpoint, {rank, 4, rendezvous, topology.host_name(1)}, network::Socket(), deadline);
      const std::vector<network::Link> links =
          network::link_all(membership, endpoint, rank, deadline);
      raise(SIGKILL);
    }
    const Error error = error_of([&] { join_network(rendezvous, rank, topology, kDeadline); });
    expect(error.code() == ErrorCode::peer_failed, error.what());
    expect(contains(error, "rank 2 has left (its process") && !contains(error, "rank 3 has left"),
           error.what());
  });
  EXPECT_TRUE(WIFSIGNALED(statuses[2]));
  for (const int rank : {0, 1, 3}) EXPECT_EQ(statuses[rank], 0) << rank;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(NetworkCommunicator, OfRanksThatLeaveBecauseOfEachOtherTheFirstIsNamed) {
  run_ranks(even_topology(3, 1), [](Communicator& group) {
    if (group.rank() == 2) return group.abort("disk full");
    if (group.rank() == 1) {
      return group.abort(error_of([&] { group.barrier("anything", kDeadline); }).what());
    }
    const auto departures = departures_of(group, 2);
    ASSERT_EQ(departures.size(), 2U);
    for (const Departure& departure : departures) {
      EXPECT_STREQ(departure.error.what(), "rank 2 has left (disk full)");
    }
    const Error error = error_of([&] { group.barrier("anything", kDeadline); });
    EXPECT_STREQ(error.what(), "rank 2 has left (disk full) while rank 0 waited for anything");
  });
}

TEST(NetworkCommunicator, AForkedChildIsNotTheRank) {
  const auto statuses =
      run_network_processes(even_topology(2, 2), kDeadline, [](Communicator& group) {
        group.barrier("the start", kDeadline);
        const pid_t child = fork();
        if (child == 0) {
          group.abort("a child's copy");
          _exit(0);
        }
        int status = -1;
        waitpid(child, &status, 0);
        expect(status == 0, "the child ends");
        group.barrier("all children have ended", kDeadline);
        expect(group.departures().empty(), "nobody has left");
        group.barrier("the end", kDeadline);
      });
  for (const int status : statuses) EXPECT_EQ(status, 0);
}

TEST(NetworkCommunicator, AProcessThatIsKilledInATransferIsNamed) {
  const auto statuses =
      run_network_processes(even_topology(2, 1), kDeadline, [](Communicator& group) {
        std::vector<std::byte> bytes(std::size_t{64} << 20);
        const RowSegment segment{bytes.data(), static_cast<std::int64_t>(bytes.size()), 1, nullptr};
        const Message message{1 - group.rank(), {&segment, 1}};
        if (group.rank() == 1) {
          // Ends with 64 MiB on the way to it.
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          raise(SIGKILL);
        }
        const Error error = error_of([&] {
          group.network()->transfer({&message, 1}, {}, "large rows", kDeadline);
        });
        expect(error.code() == ErrorCode::peer_failed, error.what());
        expect(contains(error, "rank 1") && contains(error, "large rows"), error.what());
      });
  EXPECT_TRUE(WIFSIGNALED(statuses[1]));
  EXPECT_EQ(statuses[0], 0);
}

TEST(NetworkCommunicator, AbortCarriesTheReasonToEveryHost) {
  run_ranks(even_topology(2, 2), [](Communicator& group) {
    if (group.rank() == 2) return group.abort("disk full");
    const Error error = error_of([&] { group.barrier("anything", kDeadline); });
    EXPECT_EQ(error.code(), ErrorCode::peer_failed);
    EXPECT_TRUE(contains(error, "rank 2") && contains(error, "disk full")) << error.what();
  });
}

TEST(NetworkCommunicator, WhoHasLeftIsSeenWithoutWaiting) {
  std::atomic<bool> has_left{false};
  std::atomic<int> num_that_looked{0};
  run_ranks(even_topology(2, 2), [&](Communicator& group) {
    group.throw_if_peer_left();
    group.barrier("the start", kDeadline);
    if (group.rank() == 2) {
      group.abort("done for");
      has_left = true;
      return;
    }
    while (!has_left) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const auto departures = group.departures();
    EXPECT_EQ(departures.size(), 1U);
    for (const Departure& departure : departures) {
      EXPECT_EQ(departure.rank, 2);
      EXPECT_EQ(departure.error.code(), ErrorCode::peer_failed);
      EXPECT_TRUE(contains(departure.error, "rank 2 has left (done for)"))
          << departure.error.what();
    }
    const Error error = error_of([&] { group.throw_if_peer_left(); });
    EXPECT_TRUE(contains(error, "rank 2 has left (done for)")) << error.what();
    ++num_that_looked;
    while (num_that_looked < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  });
}

TEST(NetworkCommunicator, WhoHasLeftIsSeenByOtherThreadsBesideMessages) {
  run_ranks(even_topology(3, 1), [](Communicator& group) {
    std::atomic<bool> is_over{false};
    std::thread looks([&] {
      while (!is_over) {
        for (const Departure& departure : group.departures()) {
          EXPECT_TRUE(contains(departure.error, "destroyed")) << departure.error.what();
        }
      }
    });
    for (int round = 0; round < 200; ++round) {
      const int mine = 10 * round + group.rank();
      int all[3] = {};
      group.all_gather(&mine, all, sizeof mine, "a gather", kDeadline);
      EXPECT_EQ(all[2], 10 * round + 2);
    }
    is_over = true;
    looks.join();
  });
}

TEST(NetworkCommunicator, ALookAtWhoHasLeftLosesNothingThatWasSent) {
  std::atomic<bool> has_left{false};
  run_ranks(even_topology(2, 1), [&](Communicator& group) {
    std::byte mine{static_cast<unsigned char>(7 + group.rank())};
    const RowSegment sent{&mine, 1, 1, nullptr};
    std::byte theirs{};
    const RowSegment received{&theirs, 1, 1, nullptr};
    const Message message{1 - group.rank(), {&sent, 1}};
    const Message answer{1 - group.rank(), {&received, 1}};
    if (group.rank() == 1) {
      group.network()->transfer({&message, 1}, {}, "the last rows", kDeadline);
      group.abort("done");
      has_left = true;
      return;
    }
    while (!has_left || group.departures().empty()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    group.network()->transfer({}, {&answer, 1}, "the last rows", kDeadline);
    EXPECT_EQ(theirs, std::byte{8});
  });
}

TEST(NetworkCommunicator, OfABrokenGroupAllOthersAreTakenAsGone) {
  run_ranks(even_topology(3, 1), [](Communicator& group) {
    if (group.rank() == 0) {
      const Error error = error_of([&] { group.barrier("the next step", 0.3); });
      EXPECT_EQ(error.code(), ErrorCode::deadline_exceeded);
    }
    const auto departures = departures_of(group, 2);
    ASSERT_EQ(departures.size(), 2U);
    for (const Departure& departure : departures) {
      EXPECT_EQ(departure.error.code(), ErrorCode::deadline_exceeded);
      EXPECT_TRUE(contains(departure.error, "the next step")) << departure.error.what();
    }
  });
}

TEST(NetworkCommunicator, APeerThatHasSentAllAndLeftIsNoFailure) {
  run_ranks(even_topology(2, 1), [](Communicator& group) {
    std::vector<std::byte> bytes(std::size_t{8} << 20, static_cast<std::byte>(group.rank()));
    const RowSegment segment{bytes.data(), static_cast<std::int64_t>(bytes.size()), 1, nullptr};
    const Message message{1 - group.rank(), {&segment, 1}};
    if (group.rank() == 1) {
      group.network()->transfer({&message, 1}, {}, "the last rows", kDeadline);
      return;
    }
    group.network()->transfer({}, {&message, 1}, "the last rows", kDeadline);
    EXPECT_EQ(bytes.back(), std::byte{1});
  });
}

TEST(NetworkCommunicator, AMissedDeadlineNamesTheMissingRankAndBreaksTheGroup) {
  std::atomic<int> num_failed{0};
  run_ranks(even_topology(3, 1), [&](Communicator& group) {
    if (group.rank() == 1) {
      while (num_failed < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const Error late = error_of([&] { group.barrier("too late", kDeadline); });
      EXPECT_EQ(late.code(), ErrorCode::deadline_exceeded) << late.what();
      return;
    }
    for (int attempt = 0; attempt < 2; ++attempt) {
      const Error error = error_of([&] { group.barrier("a slow peer", 0.3); });
      EXPECT_EQ(error.code(), ErrorCode::deadline_exceeded);
      EXPECT_TRUE(contains(error, "a slow peer")) << error.what();
      EXPECT_TRUE(contains(error, "missing: rank 1")) << error.what();
    }
    ++num_failed;
  });
}

}  // namespace
}  // namespace megamoe
