// Gradients of the shared parameters, shard by shard, in memory that all ranks read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "megamoe/communicator.h"
#include "train/backend.h"
#include "train/parameters.h"
#include "train/sharding.h"

namespace megamoe::trainer {

class GradientShards {
 public:
  /// Collective. `count` values a shard: those of the shared group. The backend must outlive it.
  GradientShards(TrainBackend& backend, std::size_t count);

  /// Where the gradient of a tensor over the tokens of this rank's shard `index` is summed.
  [[nodiscard]] float* of(std::int64_t index, const ParameterSlice& slice) {
    return shard(backend_.group().rank(), index) + slice.offset;
  }
  /// Sets this rank's shards to 0.
  void clear();
  /// Collective. Writes the sum over all shards, in their order: the same bits on every rank, and
  /// for every number of ranks. Every rank reads all shards where they lie: on GPUs over NVLink,
  /// between two meetings of the ranks. The shared parameters of a larger model would be worth a
  /// reduce-scatter; these are few.
  void sum(std::span<float> total);

 private:
  [[nodiscard]] float* shard(int rank, std::int64_t index) const;

  TrainBackend& backend_;
  std::size_t count_;
  std::unique_ptr<SymmetricHeap> heap_;  // of a rank: its shards, each `count_` floats
  std::vector<const float*> all_shards_;
};

}  // namespace megamoe::trainer
