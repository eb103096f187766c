#include "train/gradient_shards.h"

namespace megamoe::trainer {
namespace {

std::size_t most_shards(int num_ranks) { return (kNumShards + num_ranks - 1) / num_ranks; }

}  // namespace

GradientShards::GradientShards(Communicator& communicator, std::size_t count)
    : communicator_(communicator),
      count_(count),
      heap_(communicator.allocate_symmetric(
          most_shards(communicator.size()) * count * sizeof(float), kDeadlineS)) {}

float* GradientShards::shard(int rank, std::int64_t index) const {
  return reinterpret_cast<float*>(heap_->peer(rank)) + index * count_;
}

void GradientShards::clear() {
  const int rank = communicator_.rank();
  const Share shards = shards_of_rank(rank, communicator_.size());
  std::fill_n(shard(rank, 0), shards.count * count_, 0.0F);
}

void GradientShards::sum(std::span<float> total) {
  communicator_.barrier("the shared gradients of all ranks", kDeadlineS);
  std::ranges::fill(total, 0.0F);
  for (int rank = 0; rank < communicator_.size(); ++rank) {
    const Share shards = shards_of_rank(rank, communicator_.size());
    for (std::int64_t index = 0; index < shards.count; ++index) {
      const float* values = shard(rank, index);
      for (std::size_t i = 0; i < count_; ++i) total[i] += values[i];
    }
  }
  // A rank may overwrite its shards once every other has read them.
  communicator_.barrier("all ranks to read the shared gradients", kDeadlineS);
}

}  // namespace megamoe::trainer
