#include "commands/layer_choices.h"

namespace megamoe::tools {

void LayerChoices::apply_to(LayerConfig& config) const {
  config.memory_mode = kMemoryModes.at(mode);
  config.overlap = overlap == "on" ? Overlap::on : Overlap::off;
  config.weight_gradient_mode = kWeightGradients.at(weight_gradients);
}

void add_layer_choices(CLI::App& command, LayerChoices& choices) {
  command
      .add_option("--mode", choices.mode,
                  "What forward keeps for backward: saved (g and u) or recompute (neither)")
      ->check(CLI::IsMember({"saved", "recompute"}))
      ->capture_default_str();
  command
      .add_option("--overlap", choices.overlap,
                  "Whether communication runs under computation (cuda)")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
  command
      .add_option("--weight-gradients", choices.weight_gradients,
                  "store-bf16, store-fp32 or accumulate-fp32")
      ->check(CLI::IsMember({"store-bf16", "store-fp32", "accumulate-fp32"}))
      ->capture_default_str();
}

}  // namespace megamoe::tools
