// What lives from a forward call to its backward call, and the pool that keeps its memory for the
// next one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "megamoe/layer.h"

namespace megamoe {

/// A CUDA graph whose replays read and write the state of a call that was captured in it.
struct CapturingGraph {
  explicit CapturingGraph(std::uint64_t its_capture) : capture(its_capture) {}
  const std::uint64_t capture;  ///< what the backend's capture_of() said
  /// Until the graph and all that was instantiated from it is destroyed.
  std::atomic<bool> exists{true};
};

/// The part that a backend fills. Sized for the layer's capacities when it is made, then reused.
struct CallState {
  CallState() = default;
  CallState(const CallState&) = delete;
  CallState& operator=(const CallState&) = delete;
  virtual ~CallState() = default;

  /// Rows received for each local expert. Valid after the forward call.
  [[nodiscard]] virtual const std::int64_t* rows_per_expert() const = 0;
  [[nodiscard]] virtual std::int64_t num_rows() const = 0;

  /// The graph that holds the state, or held it; null for none.
  std::shared_ptr<const CapturingGraph> graph;
  [[nodiscard]] bool is_in_graph() const { return graph != nullptr && graph->exists; }
};

/// Call states that no context holds. Shared by the layer and its contexts: a context may outlive
/// its layer.
///
/// A graph may be replayed between any two calls, between a forward call and its backward call too.
/// So a state that a graph holds goes to no call outside of its capture as long as the graph
/// exists.
class CallStatePool {
 public:
  /// A used state for a call of the capture, 0 for a call outside of any; null where there is none.
  std::unique_ptr<CallState> take(std::uint64_t capture) {
    const std::lock_guard lock(mutex_);
    auto found = std::find_if(free_.rbegin(), free_.rend(), [capture](const auto& state) {
      return state->is_in_graph() && state->graph->capture == capture;
    });
    if (found == free_.rend()) {
      found = std::find_if(free_.rbegin(), free_.rend(),
                           [](const auto& state) { return !state->is_in_graph(); });
    }
    if (found == free_.rend()) return nullptr;
    std::unique_ptr<CallState> state = std::move(*found);
    free_.erase(std::next(found).base());
    return state;
  }

  void give_back(std::unique_ptr<CallState> state) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(state));
  }

  /// That a call was captured in the graph.
  void add_graph(std::shared_ptr<const CapturingGraph> graph) {
    const std::lock_guard lock(mutex_);
    std::erase_if(graphs_, [](const auto& other) { return !other->exists; });
    graphs_.push_back(std::move(graph));
  }
  /// Whether a graph exists in which a call was captured.
  bool has_graph() {
    const std::lock_guard lock(mutex_);
    return std::any_of(graphs_.begin(), graphs_.end(),
                       [](const auto& graph) -> bool { return graph->exists; });
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<CallState>> free_;
  std::vector<std::shared_ptr<const CapturingGraph>> graphs_;
};

}  // namespace megamoe
