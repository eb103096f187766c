// What lives from a forward call to its backward call, and the pool that keeps its memory for the
// next one.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "megamoe/layer.h"

namespace megamoe {

/// The part that a backend fills. Sized for the layer's capacities when it is made, then reused.
struct CallState {
  CallState() = default;
  CallState(const CallState&) = delete;
  CallState& operator=(const CallState&) = delete;
  virtual ~CallState() = default;

  /// Rows received for each local expert. Valid after the forward call.
  [[nodiscard]] virtual const std::int64_t* rows_per_expert() const = 0;
  [[nodiscard]] virtual std::int64_t num_rows() const = 0;
};

/// Call states that no context holds. Shared by the layer and its contexts: a context may outlive
/// its layer.
class CallStatePool {
 public:
  /// A used state, or null where there is none.
  std::unique_ptr<CallState> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return nullptr;
    std::unique_ptr<CallState> state = std::move(free_.back());
    free_.pop_back();
    return state;
  }

  void give_back(std::unique_ptr<CallState> state) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(state));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<CallState>> free_;
};

}  // namespace megamoe
