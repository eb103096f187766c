// Ranks must be built alike: they compare their configurations before anything else.
#pragma once

#include "megamoe/communicator.h"
#include "megamoe/config.h"

namespace megamoe {

/// Collective. Validates this rank's configuration and compares all of them; throws on every rank:
/// this rank's own error, or that of the peer ("rank r: ..."), or config_mismatch naming the
/// member, the ranks and their values.
void agree_on_config(const LayerConfig& config, Communicator& communicator);

}  // namespace megamoe
