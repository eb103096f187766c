// A rank's workspace: the memory that peers reach, and whatever else the backend works in. Used by
// one call at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "comm/workspace_layout.h"
#include "megamoe/error.h"
#include "megamoe/layer.h"

namespace megamoe {

WorkspaceDims workspace_dims(const LayerConfig& config, int num_ranks);

/// What a backend keeps in a workspace beside the symmetric memory: row buffers, scratch, threads
/// or streams.
class WorkspaceMemory {
 public:
  WorkspaceMemory() = default;
  WorkspaceMemory(const WorkspaceMemory&) = delete;
  WorkspaceMemory& operator=(const WorkspaceMemory&) = delete;
  virtual ~WorkspaceMemory() = default;
  /// See poison() below; of the symmetric memory, too.
  virtual void poison() = 0;
};

struct Workspace::Impl {
  Impl(const LayerConfig& config, Communicator& group);

  Communicator& communicator;
  Backend backend;
  WorkspaceBytes bytes;
  std::uint64_t group_id = 0;  ///< equal on all ranks; of no other living workspace of the group
  std::unique_ptr<SymmetricHeap> symmetric;
  std::unique_ptr<WorkspaceMemory> memory;
  std::int64_t num_layers_built = 0;  ///< equal on all ranks: layers are built collectively
  std::int64_t num_calls = 0;         ///< likewise
  std::atomic_flag in_use;
};

/// Holds a workspace for the length of a call. Throws where another call holds it.
class Occupied {
 public:
  explicit Occupied(std::atomic_flag& in_use) : in_use_(in_use) {
    if (in_use_.test_and_set()) {
      throw Error(ErrorCode::invalid_argument,
                  "workspace is in use by another call; calls on one workspace must not overlap");
    }
  }
  Occupied(const Occupied&) = delete;
  Occupied& operator=(const Occupied&) = delete;
  ~Occupied() { in_use_.clear(); }

 private:
  std::atomic_flag& in_use_;
};

/// Fills the whole workspace of this rank with NaN patterns, so that a read of what no call has
/// written shows. For tests; no call may be running on any rank.
void poison(Workspace& workspace);

}  // namespace megamoe
