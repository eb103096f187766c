// Layer shapes by name.
#pragma once

#include <string>
#include <vector>

#include "megamoe/config.h"

namespace megamoe::bench {

struct NamedShape {
  std::string name;
  MoeShape shape;  ///< max_tokens is left 0
};

/// The layers of published models, in full.
const std::vector<NamedShape>& model_shapes();

/// "qwen3-30b", or "qwen3-30b/4" for a model whose hidden, intermediate and number of experts are a
/// quarter. Throws std::invalid_argument with a message for the user.
NamedShape parse_shape(const std::string& text);

}  // namespace megamoe::bench
