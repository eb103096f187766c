// Checkpoint files. All numbers little-endian:
//
//   magic           8 bytes "MMOETRN1"
//   format version  u32
//   description     u32: its length in bytes, then that many bytes of JSON (describe_run)
//   step            u64
//   counts          4 x u64: floats in values of shared, of experts, in biases, and bytes in total
//   floats          shared: values, first moments, second moments; experts: the same; biases
//   checksum        u64, of every byte before it
//
// The experts' tensors hold all experts, so that a checkpoint does not depend on the number of
// ranks. The order of the data is a function of seed and step and needs no state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace megamoe::trainer {

/// Values and optimizer moments of a group of parameters, over all ranks.
struct GroupState {
  std::vector<float> values;
  std::vector<float> first_moments;
  std::vector<float> second_moments;
};

struct Checkpoint {
  std::string description;  ///< describe_run() of the run that wrote it
  std::int64_t step = 0;    ///< steps taken
  GroupState shared;
  GroupState experts;                 ///< tensor by tensor, each [E, ...]
  std::vector<float> selection_bias;  ///< [L, E]
};

/// Throws Error (invalid_argument) naming `path` when a file cannot be made beside it.
void check_checkpoint_path(const std::string& path);

/// Writes a file beside `path`, flushes it to the disk and renames it: `path` is always a whole
/// checkpoint, the old one or the new one. Throws Error (internal) naming `path`.
void write_checkpoint(const std::string& path, const Checkpoint& checkpoint);

/// Throws Error (invalid_argument) naming `path` and what is wrong with it: missing, cut, altered,
/// no checkpoint, another format, or of a run whose description is not `description` (naming the
/// options that differ).
Checkpoint read_checkpoint(const std::string& path, const std::string& description);

}  // namespace megamoe::trainer
