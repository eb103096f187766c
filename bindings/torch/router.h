// The routers on devices that the router's operators share.
#pragma once

#include <functional>

#include "layer/agreement.h"
#include "megamoe/layer.h"

namespace megamoe::torch_ops {

/// Waits for the calls of every router on a device, and returns the first failure that one has
/// reported. Nothing is reported twice.
LocalOutcome check_routers(const std::function<Stream(int device)>& stream_of);

}  // namespace megamoe::torch_ops
