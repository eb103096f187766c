// What the CPU backend keeps in a workspace: row buffers, threads and their scratch.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "cpu/thread_pool.h"
#include "cpu/thread_scratch.h"
#include "layer/workspace.h"
#include "routing/plan.h"

namespace megamoe::cpu {

class CpuWorkspace final : public WorkspaceMemory {
 public:
  /// Throws Error(out_of_memory) with the size.
  CpuWorkspace(const LayerConfig& config, Workspace::Impl& workspace);
  void poison() override;

  struct FreeAligned {
    void operator()(std::byte* memory) const {
      ::operator delete[](memory, std::align_val_t{RegionAllocator::kAlignment});
    }
  };
  std::unique_ptr<std::byte[], FreeAligned> local;
  ThreadPool threads;
  std::vector<ThreadScratch> scratch;  ///< one a thread
  PlanScratch plan_scratch;

 private:
  Workspace::Impl& workspace_;
};

}  // namespace megamoe::cpu
