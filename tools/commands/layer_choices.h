// The options of `bench` and `trace` that say how a layer works.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "megamoe/config.h"

namespace megamoe::tools {

struct LayerChoices {
  std::string mode = "saved";
  std::string overlap = "on";
  std::string weight_gradients = "store-bf16";

  void apply_to(LayerConfig& config) const;
};

/// --mode, --overlap and --weight-gradients. `choices` outlives the parsing.
void add_layer_choices(CLI::App& command, LayerChoices& choices);

}  // namespace megamoe::tools
