// What the operators share behind a group's name: its communicator, the layers built on it, and the
// contexts of forward calls that wait for their backward call.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "layer/agreement.h"
#include "megamoe/megamoe.h"

namespace megamoe::torch_ops {

/// A layer with what must outlive it; shared by the group and the contexts of its calls.
struct BuiltLayer {
  BuiltLayer(const LayerConfig& config, std::shared_ptr<Communicator> group,
             std::shared_ptr<Workspace> buffers)
      : communicator(std::move(group)),
        workspace(std::move(buffers)),
        layer(config, *communicator, *workspace) {}

  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Workspace> workspace;
  MoeLayer layer;
};

/// One expert-parallel group. All decisions about what is built depend on the calls alone, never on
/// what happens to be alive, so that all ranks take the same ones.
class Group {
 public:
  Group(std::shared_ptr<Communicator> communicator, double entry_deadline_s,
        double inner_deadline_s);

  [[nodiscard]] int rank() const { return communicator_->rank(); }
  [[nodiscard]] int size() const { return communicator_->size(); }
  /// One call at a time: a communicator serves one thread.
  [[nodiscard]] std::unique_lock<std::mutex> enter() { return std::unique_lock(mutex_); }

  /// Collective. The layer for `config`, built when there is none yet; `local` is how far this rank
  /// came on its own, and where it failed every rank throws. `config.shape.max_tokens` of 0 takes
  /// the next power of two above the T of every rank. Deadlines are the group's.
  std::shared_ptr<BuiltLayer> layer_for(LayerConfig config, std::int64_t num_tokens,
                                        const LocalOutcome& local);
  /// Collective. Whether `mine` holds on any rank; throws on every rank where one failed.
  bool any_rank(bool mine, const LocalOutcome& local);
  /// Collective: every value becomes the sum over ranks.
  void all_reduce_sum(float* values, std::size_t count);

 private:
  /// Returns the largest value of all ranks.
  std::int64_t agree_on_largest(std::int64_t value, const LocalOutcome& local, const char* what);
  std::shared_ptr<Workspace> workspace_for(const LayerConfig& config);

  std::shared_ptr<Communicator> communicator_;
  double entry_deadline_s_;
  double inner_deadline_s_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<BuiltLayer>> layers_;
  std::vector<std::shared_ptr<Workspace>> workspaces_;
};

/// Throws invalid_argument where the name has no group.
std::shared_ptr<Group> find_group(const std::string& name);
bool has_group(const std::string& name);
/// Replaces a group of that name.
void put_group(const std::string& name, std::shared_ptr<Group> group);
/// Forgets a group; contexts of its calls stay usable.
void drop_group(const std::string& name);

/// A forward call that a backward call may still ask for.
struct PendingCall {
  std::shared_ptr<Group> group;
  std::shared_ptr<BuiltLayer> layer;
  CallContext context;
  std::vector<std::int64_t> rows_per_expert;
};

/// Keeps a call until release_call(key); the key is the address of its rows_per_expert.
void* keep_call(std::unique_ptr<PendingCall> call);
void release_call(void* key) noexcept;
/// Null where the key is not of a call that is kept. The call stays valid while the caller holds
/// the tensor that owns it.
PendingCall* find_call(const void* key);
std::int64_t num_kept_calls();

}  // namespace megamoe::torch_ops
