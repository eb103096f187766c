// From a failure record to the error that a user sees.
#pragma once

#include "device/call_control.h"
#include "megamoe/error.h"

namespace megamoe::gpu {

/// The error that a record with is_set describes.
Error to_error(const device::FailureRecord& record);

}  // namespace megamoe::gpu
