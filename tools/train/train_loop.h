// Training: what `megamoe train` does between its arguments and its output.
#pragma once

#include <functional>

#include "train/log.h"
#include "train/options.h"

namespace megamoe::trainer {

/// Called on one of the ranks' threads as training goes on; an exception ends the training. Either
/// may be empty.
struct TrainCallbacks {
  std::function<void(const StepRecord&)> on_step;
  std::function<void(const FinalRecord&)> on_end;
};

/// Trains, with the ranks as threads of this process, and writes the log and the checkpoint that
/// the options ask for. Before the first step it throws OptionError, or Error (invalid_argument)
/// naming the text, log or checkpoint that is wrong; later what the layer or a full disk throws.
void train(const TrainOptions& options, const TrainCallbacks& callbacks);

}  // namespace megamoe::trainer
