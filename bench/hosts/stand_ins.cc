#include "stand_ins.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "free_rendezvous.h"
#include "megamoe/cuda.h"

namespace megamoe::bench {

int run_stand_ins(int argc, char** argv) {
  if (num_cuda_devices() < 2) {
    std::fprintf(stderr, "hosts_bench: needs two GPUs, a stand-in host each\n");
    return 1;
  }
  const std::string rendezvous = free_rendezvous();
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  setenv("NCCL_NET", "Socket", 1);
  setenv("NCCL_IB_DISABLE", "1", 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  std::vector<pid_t> processes;
  for (int host = 0; host < 2; ++host) {
    setenv("NCCL_HOSTID", ("stand-in-" + std::to_string(host)).c_str(), 1);
    setenv("CUDA_VISIBLE_DEVICES", std::to_string(host).c_str(), 1);
    std::vector<std::string> arguments(argv, argv + argc);
    for (const std::string& added :
         {std::string("--launched"), std::string("--rank"), std::to_string(host),
          std::string("--world-size"), std::string("2"), std::string("--rendezvous"), rendezvous,
          std::string("--host-name"), "stand-in " + std::to_string(host)}) {
      arguments.push_back(added);
    }
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    pid_t process = 0;
    const int error =
        posix_spawn(&process, "/proc/self/exe", nullptr, nullptr, pointers.data(), environ);
    if (error != 0) {
      std::fprintf(stderr, "hosts_bench: %s\n", std::strerror(error));
      return 1;
    }
    processes.push_back(process);
  }
  int result = 0;
  for (const pid_t process : processes) {
    int status = 0;
    waitpid(process, &status, 0);
    if (status != 0) result = 1;
  }
  return result;
}

}  // namespace megamoe::bench
