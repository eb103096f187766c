// The trainer's backend on the host: memory is the host's, work is done when a call returns.
#pragma once

#include <memory>

#include "train/backend.h"

namespace megamoe::trainer {

std::unique_ptr<TrainBackend> make_cpu_backend(Communicator& host_group);

}  // namespace megamoe::trainer
