// Symmetric memory of ranks with a device each: NCCL's windows.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/cuda/nccl_communicator.h"
#include "megamoe/communicator.h"
#include "megamoe/error.h"

namespace megamoe::nccl {

/// Memory of NCCL's allocator, and the window that it is in.
struct WindowMemory {
  void* data = nullptr;
  std::size_t bytes = 0;
  ncclWindow_t window = nullptr;
};

/// The ranks of a host, joined so that they can make windows. Outlives its heaps.
class WindowGroup {
 public:
  /// Collective among the ranks of a host; on the current device, this rank's of `devices_R`, which
  /// hold those of the whole group. `has_left_R` are the words of this rank's PeerWatch, and valid
  /// as long as heaps are made. Throws Error as NcclCommunicator does.
  WindowGroup(const ncclUniqueId& id, const Communicator& group, std::vector<int> devices_R,
              const std::uint32_t* has_left_R, double deadline_s);
  WindowGroup(const WindowGroup&) = delete;
  WindowGroup& operator=(const WindowGroup&) = delete;
  ~WindowGroup();

  [[nodiscard]] int device() const { return devices_R_[communicator_.members().rank]; }
  /// Peers may be gone without a farewell. From any thread.
  void fail() { has_failed_ = true; }

  /// Puts it into a window, collectively. Throws unsupported with NCCL's reason, else as
  /// NcclCommunicator::settle(); then the group has failed and the memory is kept to its end: NCCL
  /// may still be at work on it, and can be stopped only with the group, whose other windows
  /// kernels may be reading.
  void make_window(std::unique_ptr<WindowMemory>& memory, double deadline_s);
  void release(std::unique_ptr<WindowMemory> memory);

  /// Where this rank loads and stores in the memory of each rank of the host. Throws unsupported
  /// with the ranks, and their devices, whose memory is not within reach.
  [[nodiscard]] std::vector<std::byte*> pointers_of(const WindowMemory& memory) const;

 private:
  [[nodiscard]] Error no_window(std::size_t bytes, const std::string& reason) const;

  std::vector<int> devices_R_;
  std::atomic<bool> has_failed_{false};
  NcclCommunicator communicator_;
  std::vector<std::unique_ptr<WindowMemory>> unfinished_;
};

/// Peers' parts are windows' addresses; the own part has one address, that of the allocation.
class WindowHeap final : public SymmetricHeap {
 public:
  /// Collective in `group`, of whose ranks those of this host are in `windows`.
  WindowHeap(std::shared_ptr<WindowGroup> windows, Communicator& group, std::size_t bytes,
             double deadline_s);
  WindowHeap(const WindowHeap&) = delete;
  WindowHeap& operator=(const WindowHeap&) = delete;
  ~WindowHeap() override;

  [[nodiscard]] std::byte* peer(int rank) const override { return peers_[rank]; }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

 private:
  void allocate();

  std::shared_ptr<WindowGroup> windows_;
  std::size_t bytes_;
  std::unique_ptr<WindowMemory> memory_;
  std::vector<std::byte*> peers_;
};

}  // namespace megamoe::nccl
