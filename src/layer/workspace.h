// A rank's workspace: the memory of workspace_layout.h, threads and their scratch. Used by one call
// at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "comm/workspace_layout.h"
#include "cpu/thread_pool.h"
#include "cpu/thread_scratch.h"
#include "megamoe/layer.h"

namespace megamoe {

WorkspaceDims workspace_dims(const LayerConfig& config, int num_ranks);

struct Workspace::Impl {
  Impl(const LayerConfig& config, Communicator& group);

  struct FreeAligned {
    void operator()(std::byte* memory) const {
      ::operator delete[](memory, std::align_val_t{RegionAllocator::kAlignment});
    }
  };

  Communicator& communicator;
  WorkspaceBytes bytes;
  std::uint64_t group_id = 0;  ///< equal on all ranks; of no other living workspace of the group
  std::unique_ptr<SymmetricHeap> symmetric;
  std::unique_ptr<std::byte[], FreeAligned> local;
  cpu::ThreadPool threads;
  std::vector<cpu::ThreadScratch> scratch;  ///< one a thread
  PlanScratch plan_scratch;
  std::int64_t num_layers_built = 0;  ///< equal on all ranks: layers are built collectively
  std::int64_t num_calls = 0;         ///< likewise
  std::atomic_flag in_use;
};

/// Fills the whole workspace of this rank with NaN patterns, so that a read of what no call has
/// written shows. For tests; no call may be running on any rank.
void poison(Workspace& workspace);

}  // namespace megamoe
