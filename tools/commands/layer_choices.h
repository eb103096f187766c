// How a layer works, as options of the command name it; and those options of `bench` and `trace`.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>

#include "megamoe/config.h"

namespace megamoe::tools {

inline const std::map<std::string, MemoryMode> kMemoryModes = {
    {"saved", MemoryMode::saved}, {"recompute", MemoryMode::recompute}};

inline const std::map<std::string, WeightGradientMode> kWeightGradients = {
    {"store-bf16", WeightGradientMode::store_bf16},
    {"store-fp32", WeightGradientMode::store_fp32},
    {"accumulate-fp32", WeightGradientMode::accumulate_fp32}};

struct LayerChoices {
  std::string mode = "saved";
  std::string overlap = "on";
  std::string weight_gradients = "store-bf16";

  void apply_to(LayerConfig& config) const;
};

/// --mode, --overlap and --weight-gradients. `choices` outlives the parsing.
void add_layer_choices(CLI::App& command, LayerChoices& choices);

}  // namespace megamoe::tools
