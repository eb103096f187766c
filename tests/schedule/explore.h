// In which order agents take their steps: at random, or in every order that can matter.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "schedule/layer_model.h"

namespace megamoe::checker {

/// How a run or a search ended.
struct Finding {
  std::string what;     ///< empty: nothing wrong
  std::string history;  ///< the last steps before it, and who waited for what
  std::uint64_t num_steps = 0;
  std::uint64_t num_states = 0;  ///< of a search
  [[nodiscard]] bool ok() const { return what.empty(); }
};

/// One run: agents of random speeds, some of them far slower than others.
Finding run_at_random(const std::shared_ptr<const LayerModel>& model, std::uint32_t seed);

enum class Reduction {
  none,        ///< every step of every agent in every order
  free_steps,  ///< steps whose time makes no difference are taken at once
  by_order     ///< and only steps whose order can matter (Machine::Step)
};

inline constexpr const char* kTooManyStates = "too many states to search";

/// Every interleaving; gives up with a Finding after `max_states`.
Finding search_all(const std::shared_ptr<const LayerModel>& model, Reduction reduction,
                   std::uint64_t max_states);

}  // namespace megamoe::checker
