// The `megamoe` command on several hosts: stand-in hosts, and processes that a launcher started.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "command_fixture.h"
#include "network_fixture.h"

namespace megamoe {
namespace {

/// For run(): the same arguments for all ranks, two a host. The outcome is that of rank 0.
std::string launched(const std::string& arguments, int num_ranks) {
  const std::string group = " --launched --world-size " + std::to_string(num_ranks) +
                            " --rendezvous " + free_rendezvous();
  std::string line;
  for (int rank = num_ranks - 1; rank >= 0; --rank) {
    line += arguments + group + " --host-name host" + std::to_string(rank / 2) + " --rank " +
            std::to_string(rank);
    if (rank > 0) line += " >/dev/null 2>&1 & " MEGAMOE_COMMAND " ";
  }
  return line;
}

constexpr const char* kSmall = "verify --hidden 32 --intermediate 32 ";

TEST_F(Command, VerifyOnStandInHosts) {
  const auto path = directory_ / "result.json";
  const Outcome outcome = run(kSmall + std::string("--ranks 4 --hosts 2 --json ") + path.string());
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  EXPECT_NE(outcome.out.find("4 ranks on 2 hosts"), std::string::npos) << outcome.out;
  EXPECT_EQ(nlohmann::json::parse(read_file(path)).at("hosts"), 2);
  const Outcome uneven = run("verify --ranks 2 --hosts 3");
  EXPECT_EQ(uneven.exit_code, 2);
  EXPECT_NE(uneven.err.find("--hosts"), std::string::npos) << uneven.err;
}

TEST_F(Command, VerifyInLaunchedProcesses) {
  const auto path = directory_ / "result.json";
  const Outcome outcome = run(launched(kSmall + std::string("--json ") + path.string(), 4));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
  EXPECT_NE(outcome.out.find("all 9 tensors PASS"), std::string::npos) << outcome.out;
  const auto result = nlohmann::json::parse(read_file(path));
  EXPECT_EQ(result.at("ranks"), 4);
  EXPECT_EQ(result.at("hosts"), 2);
}

TEST_F(Command, VerifyInLaunchedProcessesFindsAWrongWeight) {
  const Outcome outcome = run(launched(kSmall + std::string("--perturb-weight up"), 2));
  EXPECT_EQ(outcome.exit_code, 1) << outcome.out << outcome.err;
  EXPECT_NE(outcome.err.find("verify: FAIL"), std::string::npos) << outcome.err;
}

TEST_F(Command, InfoSaysWhoReachesWhomHow) {
  const Outcome outcome = run(launched("info --json", 4));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto info = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(info.at("ranks").at(2).at("host"), "host1");
  EXPECT_EQ(info.at("ranks").at(2).at("reaches_by"),
            nlohmann::json({"network", "network", "own", "load/store"}));
  EXPECT_NE(run(launched("info", 2)).out.find("ranks 0-1 on host0"), std::string::npos);
  const Outcome uneven = run(launched("info", 3));
  EXPECT_EQ(uneven.exit_code, 1);
  EXPECT_NE(uneven.err.find("host0 holds ranks 0-1, host1 holds rank 2"), std::string::npos)
      << uneven.err;
}

TEST_F(Command, OptionsOfCallsOverHostsAreRefusedByName) {
  struct Refused {
    const char* arguments;
    const char* option;
    const char* why;
  };
  for (const Refused& refused : std::initializer_list<Refused>{
           {"verify --network-groups 9 --backend cuda", "--network-groups", "range 0 to 8"},
           {"verify --network-groups -1 --backend cuda", "--network-groups", "range 0 to 8"},
           {"verify --network-ctas 65 --backend cuda", "--network-ctas", "range 0 to 64"},
           {"verify --network-groups 3", "--network-groups", "--backend cuda"},
           {"verify --network-ctas 4", "--network-ctas", "--backend cuda"},
           {"bench --launched --network-groups 9 --backend cuda", "--network-groups",
            "range 0 to 8"},
           {"bench --launched --network-ctas 4", "--network-ctas", "--backend cuda"},
           {"bench --network-groups 3 --backend cuda", "--network-groups", "--launched"}}) {
    const Outcome outcome = run(refused.arguments);
    EXPECT_EQ(outcome.exit_code, 2) << refused.arguments;
    EXPECT_NE(outcome.err.find(refused.option), std::string::npos) << outcome.err;
    EXPECT_NE(outcome.err.find(refused.why), std::string::npos) << outcome.err;
  }
}

/// Every launcher's variables, of two processes in a Slurm job; there Slurm says of both that they
/// are rank 0 of 4, unless it has started them itself.
TEST_F(Command, RankAndSizeAreTheLaunchers) {
  struct Launcher {
    const char* name;
    std::string rank;
    std::string num_ranks;
  };
  for (const Launcher& launcher :
       std::initializer_list<Launcher>{{"torchrun", "RANK", "WORLD_SIZE"},
                                       {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                       {"MPICH", "PMI_RANK", "PMI_SIZE"},
                                       {"srun", "SLURM_PROCID", "SLURM_NTASKS"}}) {
    SCOPED_TRACE(launcher.name);
    const auto environment = [&](int rank) {
      return "SLURM_PROCID=0 SLURM_NTASKS=4 " + launcher.rank + "=" + std::to_string(rank) + " " +
             launcher.num_ranks + "=2";
    };
    const std::string arguments =
        "info --launched --json --host-name a --rendezvous " + free_rendezvous();
    const Outcome outcome = run(
        arguments + " >/dev/null 2>&1 & " + environment(0) + " " + MEGAMOE_COMMAND " " + arguments,
        environment(1));
    ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_EQ(nlohmann::json::parse(outcome.out).at("ranks").size(), 2U);
  }
}

TEST_F(Command, RankAndSizeOfDifferentLaunchersAreNotMixed) {
  const Outcome mixed = run("info --launched --rendezvous 127.0.0.1:1",
                            "WORLD_SIZE=1 PMI_RANK=7 PMI_SIZE=5 SLURM_PROCID=0");
  EXPECT_EQ(mixed.exit_code, 1);
  EXPECT_NE(mixed.err.find("rank is 7, must be from 0 to 4"), std::string::npos) << mixed.err;
  const Outcome no_number =
      run("info --launched --rank 0 --rendezvous 127.0.0.1:1", "PMI_RANK=7 PMI_SIZE=five");
  EXPECT_EQ(no_number.exit_code, 2);
  EXPECT_NE(no_number.err.find("--world-size: the launcher's PMI_SIZE is 'five'"),
            std::string::npos)
      << no_number.err;
}

TEST_F(Command, WhatNoLauncherSaysIsNamed) {
  const auto expect_usage_error = [&](const std::string& arguments, const std::string& option) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_NE(outcome.err.find(option), std::string::npos) << outcome.err;
  };
  expect_usage_error("info --launched", "--rank: ");
  expect_usage_error("info --launched --rank 0", "--world-size: ");
  expect_usage_error("info --launched --rank 0 --world-size 1", "--rendezvous: ");
  expect_usage_error("verify --launched --ranks 2", "--ranks");
  for (const std::string option :
       {"--rank 0", "--world-size 1", "--rendezvous a:1", "--host-name a"}) {
    expect_usage_error("verify " + option, "requires --launched");
  }
  const Outcome outcome = run("info --launched --rank 0 --world-size 1 --rendezvous nowhere");
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_NE(outcome.err.find("ADDRESS:PORT"), std::string::npos) << outcome.err;
  for (const std::string port : {"65535", "0", "-1", "2147483647", "many"}) {
    const Outcome of_port =
        run("info --launched --rank 0 --world-size 1", "MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port);
    EXPECT_EQ(of_port.exit_code, 2);
    EXPECT_NE(of_port.err.find("no port follows the launcher's MASTER_PORT '" + port + "'"),
              std::string::npos)
        << of_port.err;
  }
}

}  // namespace
}  // namespace megamoe
