// Between the ranks' parts of a training state and a checkpoint, which has all of it.
#pragma once

#include <memory>
#include <string>

#include "megamoe/communicator.h"
#include "train/checkpoint.h"
#include "train/model.h"

namespace megamoe::trainer {

/// Gathers the state of all ranks through memory that they share.
class StateGatherer {
 public:
  /// Collective. The model must outlive it.
  explicit StateGatherer(Model& model);

  /// Collective. Returns the whole state on rank 0, and an empty one elsewhere.
  Checkpoint gather(std::int64_t step, const std::string& description);

 private:
  Model& model_;
  std::unique_ptr<SymmetricHeap> heap_;  // of a rank: values, first and second moments of experts
};

/// Puts this rank's part of a checkpoint into the model. Throws Error (invalid_argument) naming
/// `path` when the checkpoint's sizes are not the model's.
void restore_state(Model& model, const Checkpoint& checkpoint, const std::string& path);

}  // namespace megamoe::trainer
