// What forward and backward of a layer over hosts take, and where that time goes.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/routing.h"
#include "cuda/stage_clock.h"
#include "megamoe/communicator.h"
#include "megamoe/config.h"
#include "options.h"

namespace megamoe::bench {

/// Of one pass, where its time went.
struct Spans {
  double total_ms = 0.0;
  double compute_ms = 0.0;  ///< products and what moves rows inside the host
  double first_ms = 0.0;    ///< until the first group's rows are there
  double last_ms = 0.0;     ///< results of the last group
  double clock_ghz = 0.0;   ///< of the multiprocessors
};

/// Of two passes, one after the other.
Spans operator+(const Spans& first, const Spans& second);

using Stages = std::vector<cuda::StageClock::Stage>;

struct Pass {
  Stages compute;
  Stages network;
};

struct LayerTimes {
  int num_groups = 1;
  Spans forward;  ///< medians of the slowest rank
  Spans backward;
  [[nodiscard]] Spans step() const { return forward + backward; }
  Traffic traffic;
  Pass last_forward;
  Pass last_backward;
};

/// Collective. One rank's passes, with as many groups as `group` has been made for.
LayerTimes time_layer(const Options& options, Communicator& group, int device, Overlap overlap);

/// A pass without overlap, whose compute_ms are what products take alone, and its transfers alone.
struct Alone {
  Spans off;
  double transfer_ms = 0.0;  ///< its bytes at the bandwidth of large messages
};

struct AllAlone {
  Alone forward;
  Alone backward;
  [[nodiscard]] Alone step() const {
    return {forward.off + backward.off, forward.transfer_ms + backward.transfer_ms};
  }
};

/// `off`: times without overlap.
AllAlone alone_of(const LayerTimes& off, double bytes_per_s);

double longer_ms(const Alone& alone);

/// What overlap can reach: the longer of the two, and what nothing can hide.
double bound_ms(const Spans& spans, const Alone& alone);

}  // namespace megamoe::bench
