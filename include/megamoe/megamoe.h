// The whole public API.
#pragma once

#include "megamoe/bf16.h"          // IWYU pragma: export
#include "megamoe/communicator.h"  // IWYU pragma: export
#include "megamoe/config.h"        // IWYU pragma: export
#include "megamoe/error.h"         // IWYU pragma: export
#include "megamoe/layer.h"         // IWYU pragma: export
#include "megamoe/network.h"       // IWYU pragma: export
#include "megamoe/router.h"        // IWYU pragma: export
#include "megamoe/tensor.h"        // IWYU pragma: export
#include "megamoe/topology.h"      // IWYU pragma: export
