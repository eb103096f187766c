// How the ranks of several hosts find each other, and who is named where they do not.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "network_fixture.h"

namespace megamoe {
namespace {

constexpr double kDeadline = 30.0;

TEST(Rendezvous, AMissingRankIsADeadlineThatNamesItOnAll) {
  const std::string rendezvous = free_rendezvous();
  expect_all_succeed(run_processes(2, [&](const std::string& /*name*/, int rank) {
    const Error error = error_of([&] {
      make_network_communicator({rank, 3, rendezvous, "host"}, rank == 0 ? 0.5 : 5.0);
    });
    expect(error.code() == ErrorCode::deadline_exceeded, error.what());
    expect(contains(error, "missing: rank 2"), error.what());
  }));
}

TEST(Rendezvous, NobodyThere) {
  const std::string rendezvous = free_rendezvous();
  const Error error = error_of([&] { make_network_communicator({1, 2, rendezvous, "host"}, 0.3); });
  EXPECT_EQ(error.code(), ErrorCode::deadline_exceeded);
  EXPECT_TRUE(contains(error, "for rank 0 at 127.0.0.1") && contains(error, "refused"))
      << error.what();
}

TEST(Rendezvous, WhatEndsTheConnectionIsNotTakenForASlowGroup) {
  const network::Socket listener = network::listen_on({"127.0.0.1", 0});
  const std::string rendezvous = "127.0.0.1:" + std::to_string(network::port_of(listener));
  std::thread stranger([&] { network::accept_from(listener, network::Deadline(10.0)); });
  const Error error = error_of([&] {
    make_network_communicator({1, 2, rendezvous, "host"}, kDeadline);
  });
  stranger.join();
  EXPECT_EQ(error.code(), ErrorCode::peer_failed);
  EXPECT_TRUE(contains(error, ("rank 1 reached " + rendezvous).c_str())) << error.what();
  EXPECT_FALSE(contains(error, "waited")) << error.what();
}

/// Debian gives a machine's name the address 127.0.1.1.
TEST(Rendezvous, AtAnyLoopbackAddress) {
  const std::string port = std::to_string(network::port_of(network::listen_on({"127.0.1.1", 0})));
  expect_all_succeed(run_processes(3, [&](const std::string& /*name*/, int rank) {
    make_network_communicator({rank, 3, "127.0.1.1:" + port, "host" + std::to_string(rank)}, 5.0)
        ->barrier("b", kDeadline);
  }));
}

/// What NCCL is told to take for hosts, where nobody names them.
TEST(Rendezvous, HostsAreThoseOfNccl) {
  const std::string rendezvous = free_rendezvous();
  expect_all_succeed(run_processes(4, [&](const std::string& /*name*/, int rank) {
    setenv("NCCL_HOSTID", rank < 2 ? "first" : "second", 1);
    const auto group = make_network_communicator({rank, 4, rendezvous, ""}, kDeadline);
    expect(group->topology().num_hosts() == 2, "two hosts");
    group->barrier("b", kDeadline);
  }));
}

TEST(Rendezvous, RanksThatDoNotFitAreRefused) {
  const std::string rendezvous = free_rendezvous();
  std::thread first([&] {
    const Error error = error_of([&] {
      make_network_communicator({0, 3, rendezvous, "host"}, 2.0);
    });
    EXPECT_EQ(error.code(), ErrorCode::deadline_exceeded) << error.what();
  });
  const Error size = error_of([&] { make_network_communicator({1, 2, rendezvous, "host"}, 2.0); });
  EXPECT_EQ(size.code(), ErrorCode::config_mismatch);
  EXPECT_TRUE(contains(size, "has 3 ranks, rank 1 was told 2")) << size.what();
  std::thread second([&] {
    const Error error = error_of([&] {
      make_network_communicator({1, 3, rendezvous, "host"}, 2.0);
    });
    EXPECT_EQ(error.code(), ErrorCode::deadline_exceeded) << error.what();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const Error twice = error_of([&] { make_network_communicator({1, 3, rendezvous, "host"}, 2.0); });
  EXPECT_EQ(twice.code(), ErrorCode::invalid_argument);
  EXPECT_TRUE(contains(twice, "has joined already")) << twice.what();
  second.join();
  first.join();
}

TEST(Rendezvous, HostsThatDoNotFitAreRefusedOnEveryRank) {
  const std::string rendezvous = free_rendezvous();
  expect_all_succeed(run_processes(3, [&](const std::string& /*name*/, int rank) {
    const std::string host = rank == 2 ? "beta" : "alpha";
    const Error error = error_of([&] {
      make_network_communicator({rank, 3, rendezvous, host}, kDeadline);
    });
    expect(error.code() == ErrorCode::unsupported, error.what());
    expect(contains(error, "alpha holds ranks 0-1, beta holds rank 2"), error.what());
  }));
}

TEST(Rendezvous, StrangersAtThePortAreIgnored) {
  const std::string rendezvous = free_rendezvous();
  std::thread stranger([&] {
    std::string why;
    const auto endpoint = network::parse_endpoint(rendezvous, "rendezvous");
    const network::Deadline deadline(10.0);
    const auto socket = network::connect_to(endpoint, deadline, why);
    ASSERT_TRUE(socket) << why;
    const std::vector<char> noise(4096, 'x');
    network::send_all(*socket, noise.data(), noise.size(), deadline);
  });
  std::thread peer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    make_network_communicator({1, 2, rendezvous, "beta"}, kDeadline)->barrier("b", kDeadline);
  });
  make_network_communicator({0, 2, rendezvous, "alpha"}, kDeadline)->barrier("b", kDeadline);
  peer.join();
  stranger.join();
}

TEST(Rendezvous, OfAnotherMachineIsNamedWhereNobodyComes) {
  // 192.0.2.0/24 is for documentation: no machine has it.
  const std::string own = free_rendezvous();
  const std::string port = own.substr(own.rfind(':'));
  const Error error = error_of([&] {
    make_network_communicator({0, 2, "192.0.2.1" + port, "host"}, 0.2);
  });
  EXPECT_EQ(error.code(), ErrorCode::deadline_exceeded) << error.what();
  EXPECT_NE(std::string(error.what()).find("no address of rank 0's machine"), std::string::npos)
      << error.what();
}

TEST(Rendezvous, ThatNothingResolvesIsRefusedAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const Error error = error_of([&] {
    make_network_communicator({0, 2, "nohost.invalid:29501", "host"}, kDeadline);
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
  EXPECT_NE(std::string(error.what()).find("nohost.invalid:29501 cannot be resolved"),
            std::string::npos)
      << error.what();
}

TEST(Rendezvous, WrongOptionsAreNamed) {
  const auto message = [](const NetworkOptions& options, double deadline_s = 0.1) {
    const Error error = error_of([&] { make_network_communicator(options, deadline_s); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    return std::string(error.what());
  };
  EXPECT_NE(message({0, 0, "a:1", ""}).find("num_ranks is 0"), std::string::npos);
  EXPECT_NE(message({2, 2, "a:1", ""}).find("rank is 2"), std::string::npos);
  EXPECT_NE(message({0, 1, "a:1", std::string(201, 'h')}).find("host_name"), std::string::npos);
  for (const double seconds : {-1.0, 0.0, HUGE_VAL, std::nan("")}) {
    EXPECT_NE(message({0, 1, "127.0.0.1:1", ""}, seconds)
                  .find("deadline_s is " + std::to_string(seconds) + " s, must be positive"),
              std::string::npos);
  }
  for (const char* text : {"", "host", ":1", "host:", "host:0", "host:70000", "host:1x", "[]:1"}) {
    EXPECT_NE(message({0, 1, text, ""}).find("rendezvous must be ADDRESS:PORT"), std::string::npos)
        << text;
  }
  const network::Socket taken = network::listen_on({"127.0.0.1", 0});
  const std::string rendezvous = "127.0.0.1:" + std::to_string(network::port_of(taken));
  EXPECT_NE(message({0, 1, rendezvous, ""}).find("cannot listen on " + rendezvous),
            std::string::npos);
}

}  // namespace
}  // namespace megamoe
