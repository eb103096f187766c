// Hosts that are processes: they see each other by NCCL's sockets on the loopback interface alone,
// as hosts with different NCCL_HOSTID do. Each runs a disabled test of this program,
// HostProcess.NAME.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "free_rendezvous.h"
#include "gpu/spawn_test.h"
#include "megamoe/cuda.h"

namespace megamoe::verify {

/// Two hosts, a process each, and the devices that each sees.
struct TwoHosts {
  const char* name;
  int ranks_per_host;
  const char* devices[2];
  int num_devices;     ///< that this needs
  bool share_devices;  ///< processes that do take turns: everything takes many times as long
};
inline void PrintTo(const TwoHosts& layout, std::ostream* out) { *out << layout.name; }

inline constexpr TwoHosts kARankEach{"ARankEach", 1, {"0", "1"}, 2, false};
inline constexpr TwoHosts kTwoOnADevice{"TwoOnADevice", 2, {"0", "1"}, 2, false};
/// The ranks of a host meet in windows.
inline constexpr TwoHosts kTwoOnTwoDevices{"TwoOnTwoDevices", 2, {"0,1", "1,0"}, 2, true};
inline constexpr TwoHosts kOnOneDevice{"OnOneDevice", 1, {"0", "0"}, 1, true};
inline constexpr TwoHosts kAllTwoHosts[] = {kOnOneDevice, kARankEach, kTwoOnADevice,
                                            kTwoOnTwoDevices};

/// Two hosts of a rank, with a device each where there are two.
inline const TwoHosts& hosts_of_a_rank() {
  return num_cuda_devices() < kARankEach.num_devices ? kOnOneDevice : kARankEach;
}

class HostProcesses {
 public:
  HostProcesses(const char* test, const TwoHosts& hosts) {
    set("MEGAMOE_TEST_RENDEZVOUS", free_rendezvous());
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

/// Tests of each of kAllTwoHosts.
class OverTwoHosts : public testing::TestWithParam<TwoHosts> {
 protected:
  void SetUp() override {
    if (num_cuda_devices() < GetParam().num_devices) GTEST_SKIP() << "needs two devices";
  }
};
inline std::string name_of_test(const testing::TestParamInfo<TwoHosts>& test) {
  return test.param.name;
}

/// In both hosts' processes the test HostProcess.`test` passes.
inline void expect_both_succeed(const char* test, const TwoHosts& layout, double deadline_s) {
  if (num_cuda_devices() < layout.num_devices) GTEST_SKIP() << "needs two devices";
  HostProcesses hosts(test, layout);
  for (int host = 0; host < 2; ++host) {
    EXPECT_EQ(hosts.status_of(host, deadline_s), 0) << "host " << host;
  }
}

}  // namespace megamoe::verify
