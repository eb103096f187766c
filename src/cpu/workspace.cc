#include "cpu/workspace.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

namespace megamoe::cpu {
namespace {

int resolved_num_threads(const LayerConfig& config, int ranks_per_host) {
  if (config.num_threads > 0) return config.num_threads;
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, cores / ranks_per_host);
}

std::byte* allocate(std::int64_t bytes) {
  auto* memory = static_cast<std::byte*>(
      ::operator new[](static_cast<std::size_t>(bytes),
                       std::align_val_t{RegionAllocator::kAlignment}, std::nothrow));
  if (memory == nullptr) {
    throw Error(ErrorCode::out_of_memory,
                "could not allocate a workspace of " + std::to_string(bytes) + " bytes");
  }
  return memory;
}

}  // namespace

CpuWorkspace::CpuWorkspace(const LayerConfig& config, Workspace::Impl& workspace)
    : local(allocate(workspace.bytes.local)),
      threads(resolved_num_threads(config, workspace.communicator.topology().ranks_per_host())),
      scratch(threads.num_threads()),
      workspace_(workspace) {
  plan_scratch.reserve(workspace_dims(config, workspace.communicator.size()).routing);
}

void CpuWorkspace::poison() {
  constexpr int kNan = 0xff;  // a NaN in bf16, fp32 and fp64; -1 as an integer
  std::memset(workspace_.symmetric->peer(workspace_.communicator.rank()), kNan,
              workspace_.bytes.symmetric);
  std::memset(local.get(), kNan, workspace_.bytes.local);
}

}  // namespace megamoe::cpu
