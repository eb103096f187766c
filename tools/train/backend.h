// Where a rank of the trainer runs: memory, operations, router and the ranks' group. The model, its
// optimizer and its checkpoints are written against this and know no device.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "megamoe/communicator.h"
#include "megamoe/layer.h"
#include "train/block_router.h"
#include "train/operations.h"

namespace megamoe::trainer {

/// What a block's router is made for.
struct BlockRouterShape {
  RouterConfig config;
  std::int64_t max_tokens;  ///< of this rank
  std::int64_t hidden_dim;
};

class TrainBackend {
 public:
  TrainBackend() = default;
  TrainBackend(const TrainBackend&) = delete;
  TrainBackend& operator=(const TrainBackend&) = delete;
  virtual ~TrainBackend() = default;

  /// The ranks, with symmetric memory in the host's.
  [[nodiscard]] virtual Communicator& host_group() = 0;
  /// The same ranks, with symmetric memory where this backend computes: the layer's group.
  [[nodiscard]] virtual Communicator& group() = 0;
  /// What the layer's calls are to run on.
  [[nodiscard]] virtual Stream stream() = 0;
  [[nodiscard]] virtual Operations& operations() = 0;
  virtual std::unique_ptr<BlockRouter> make_router(const BlockRouterShape& shape) = 0;

  /// Zeroed; throws Error (out_of_memory).
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
  /// From and to host memory, in the order of the operations. A download waits; the source of an
  /// upload may be changed on return.
  virtual void upload(void* to, const void* host, std::size_t bytes) = 0;
  virtual void download(void* host, const void* from, std::size_t bytes) = 0;
  /// Until all that was begun is done and peers can see it.
  virtual void wait() = 0;
};

/// Throws Error (unsupported), before anything is begun, where this build or this machine cannot
/// train on `backend`; the message says what is missing.
void require_backend(Backend backend);

/// The backend of one rank, whose host group is `host_group`. Collective. Throws as
/// require_backend() and make_cuda_communicator() do.
std::unique_ptr<TrainBackend> make_backend(Backend backend, Communicator& host_group);

/// A fixed number of Ts in a backend's memory.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(TrainBackend& backend, std::int64_t count)
      : memory_(backend.allocate(static_cast<std::size_t>(count) * sizeof(T))), count_(count) {}

  [[nodiscard]] T* data() { return reinterpret_cast<T*>(memory_.get()); }
  [[nodiscard]] const T* data() const { return reinterpret_cast<const T*>(memory_.get()); }
  [[nodiscard]] std::int64_t count() const { return count_; }
  /// To be read and written on the host only where the backend's memory is the host's.
  [[nodiscard]] std::span<T> span() { return {data(), static_cast<std::size_t>(count_)}; }

 private:
  std::shared_ptr<std::byte> memory_;
  std::int64_t count_ = 0;
};

}  // namespace megamoe::trainer
