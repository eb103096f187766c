#include "train/training_state.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "megamoe/error.h"
#include "train/sharding.h"

namespace megamoe::trainer {
namespace {

using Buffers = std::array<std::span<float>, 3>;

Buffers buffers_of(ParameterGroup& group) {
  return {group.values(), group.first_moments(), group.second_moments()};
}

std::array<std::vector<float>*, 3> buffers_of(GroupState& state) {
  return {&state.values, &state.first_moments, &state.second_moments};
}
std::array<const std::vector<float>*, 3> buffers_of(const GroupState& state) {
  return {&state.values, &state.first_moments, &state.second_moments};
}

/// Where rank `rank`'s part of an expert tensor [E, ...] begins, given the slice of its own
/// [e, ...]: the tensors before it are num_ranks times as large as well.
std::size_t global_offset(const ParameterSlice& slice, int rank, int num_ranks) {
  return slice.offset * num_ranks + slice.count * rank;
}

}  // namespace

StateGatherer::StateGatherer(Model& model)
    : model_(model),
      heap_(model.backend().host_group().allocate_symmetric(
          3 * model.experts().count() * sizeof(float), kDeadlineS)) {}

Checkpoint StateGatherer::gather(std::int64_t step, const std::string& description) {
  TrainBackend& backend = model_.backend();
  Communicator& communicator = backend.host_group();
  ParameterGroup& experts = model_.experts();
  const std::size_t buffer_bytes = experts.count() * sizeof(float);
  std::byte* mine = heap_->peer(communicator.rank());
  for (const std::span<float> buffer : buffers_of(experts)) {
    backend.download(mine, buffer.data(), buffer_bytes);
    mine += buffer_bytes;
  }
  communicator.barrier("the experts of all ranks for a checkpoint", kDeadlineS);

  Checkpoint checkpoint;
  if (communicator.rank() == 0) {
    checkpoint.description = description;
    checkpoint.step = step;
    const int num_ranks = communicator.size();
    for (std::size_t i = 0; i < 3; ++i) {
      const std::span<float> shared = buffers_of(model_.shared())[i];
      std::vector<float>& all_shared = *buffers_of(checkpoint.shared)[i];
      all_shared.resize(shared.size());
      backend.download(all_shared.data(), shared.data(), shared.size_bytes());
      std::vector<float>& all_experts = *buffers_of(checkpoint.experts)[i];
      all_experts.resize(experts.count() * num_ranks);
      for (int rank = 0; rank < num_ranks; ++rank) {
        const std::byte* theirs = heap_->peer(rank) + i * buffer_bytes;
        for (const ParameterSlice& slice : experts.slices()) {
          std::memcpy(&all_experts[global_offset(slice, rank, num_ranks)],
                      theirs + slice.offset * sizeof(float), slice.count * sizeof(float));
        }
      }
    }
    for (MoeBlock& block : model_.blocks()) {
      std::vector<float> bias(block.num_experts());
      backend.download(bias.data(), block.selection_bias(), bias.size() * sizeof(float));
      checkpoint.selection_bias.insert(checkpoint.selection_bias.end(), bias.begin(), bias.end());
    }
  }
  communicator.barrier("rank 0 to read the experts of all ranks", kDeadlineS);
  return checkpoint;
}

void restore_state(Model& model, const Checkpoint& checkpoint, const std::string& path) {
  TrainBackend& backend = model.backend();
  const int num_ranks = backend.host_group().size();
  ParameterGroup& shared = model.shared();
  ParameterGroup& experts = model.experts();
  std::size_t num_biases = 0;
  for (const MoeBlock& block : model.blocks()) num_biases += block.num_experts();
  if (checkpoint.shared.values.size() != shared.count() ||
      checkpoint.experts.values.size() != experts.count() * num_ranks ||
      checkpoint.selection_bias.size() != num_biases) {
    throw Error(ErrorCode::invalid_argument,
                "checkpoint " + path + ": has another number of parameters than this model");
  }
  for (std::size_t i = 0; i < 3; ++i) {
    const std::span<float> to_shared = buffers_of(shared)[i];
    backend.upload(to_shared.data(), buffers_of(checkpoint.shared)[i]->data(),
                   to_shared.size_bytes());
    const std::vector<float>& all_experts = *buffers_of(checkpoint.experts)[i];
    for (const ParameterSlice& slice : experts.slices()) {
      const std::size_t from = global_offset(slice, backend.host_group().rank(), num_ranks);
      backend.upload(buffers_of(experts)[i].data() + slice.offset, &all_experts[from],
                     slice.count * sizeof(float));
    }
  }
  const float* next = checkpoint.selection_bias.data();
  for (MoeBlock& block : model.blocks()) {
    backend.upload(block.selection_bias(), next, block.num_experts() * sizeof(float));
    next += block.num_experts();
  }
  model.parameters_changed();
}

}  // namespace megamoe::trainer
