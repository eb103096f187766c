#include "train/gradient_shards.h"

namespace megamoe::trainer {
namespace {

std::size_t most_shards(int num_ranks) { return (kNumShards + num_ranks - 1) / num_ranks; }

}  // namespace

GradientShards::GradientShards(TrainBackend& backend, std::size_t count)
    : backend_(backend),
      count_(count),
      heap_(backend.group().allocate_symmetric(
          most_shards(backend.group().size()) * count * sizeof(float), kDeadlineS)) {
  const int num_ranks = backend.group().size();
  for (int rank = 0; rank < num_ranks; ++rank) {
    const Share shards = shards_of_rank(rank, num_ranks);
    for (std::int64_t index = 0; index < shards.count; ++index) {
      all_shards_.push_back(shard(rank, index));
    }
  }
}

float* GradientShards::shard(int rank, std::int64_t index) const {
  return reinterpret_cast<float*>(heap_->peer(rank)) + index * count_;
}

void GradientShards::clear() {
  const int rank = backend_.group().rank();
  const Share shards = shards_of_rank(rank, backend_.group().size());
  if (shards.count == 0) return;
  backend_.operations().zero(shard(rank, 0), shards.count * count_ * sizeof(float));
}

void GradientShards::sum(std::span<float> total) {
  backend_.wait();
  backend_.group().barrier("the shared gradients of all ranks", kDeadlineS);
  backend_.operations().sum_in_order(all_shards_, static_cast<std::int64_t>(count_), total.data());
  // A rank may overwrite its shards once every other has read them.
  backend_.wait();
  backend_.group().barrier("all ranks to read the shared gradients", kDeadlineS);
}

}  // namespace megamoe::trainer
