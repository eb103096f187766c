#include "group.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "layer/fingerprint.h"

namespace megamoe::torch_ops {
namespace {

/// Token counts below this share one layer.
constexpr std::int64_t kSmallestMaxTokens = 64;

/// Everything of a configuration that a caller chose.
std::string key_of(const LayerConfig& config) {
  std::ostringstream key;
  key << config.shape.hidden_dim << ' ' << config.shape.intermediate_dim << ' '
      << config.shape.num_experts << ' ' << config.shape.top_k << ' '
      << static_cast<int>(config.activation.kind) << ' '
      << std::bit_cast<std::int32_t>(config.activation.limit) << ' '
      << static_cast<int>(config.memory_mode) << ' ' << static_cast<int>(config.overlap) << ' '
      << static_cast<int>(config.weight_gradient_mode) << ' ' << static_cast<int>(config.backend)
      << ' ' << config.row_capacity << ' ' << config.shape.max_tokens;
  return key.str();
}

bool fits(const WorkspaceBytes& need, const WorkspaceBytes& have) {
  return need.symmetric <= have.symmetric && need.local <= have.local;
}

/// Never destroyed: tensors that own calls may die after static objects.
template <class Value, class Key>
struct Registry {
  std::mutex mutex;
  std::unordered_map<Key, Value> entries;
  static Registry& instance() {
    static auto* registry = new Registry;
    return *registry;
  }
};
using Groups = Registry<std::shared_ptr<Group>, std::string>;
using Calls = Registry<std::unique_ptr<PendingCall>, const void*>;

}  // namespace

Group::Group(std::shared_ptr<Communicator> communicator, double entry_deadline_s,
             double inner_deadline_s)
    : communicator_(std::move(communicator)),
      entry_deadline_s_(entry_deadline_s),
      inner_deadline_s_(inner_deadline_s) {}

std::int64_t Group::agree_on_largest(std::int64_t value, const LocalOutcome& local,
                                     const char* what) {
  struct Record {
    LocalOutcome outcome;
    std::int64_t value;
  };
  const Record mine{local, value};
  std::vector<Record> all(size(), mine);
  if (size() > 1) {
    communicator_->all_gather(&mine, all.data(), sizeof(Record), what, entry_deadline_s_);
  }
  for (int peer = 0; peer < size(); ++peer) throw_if_failed(all[peer].outcome, peer, rank());
  return std::max_element(all.begin(), all.end(),
                          [](const Record& a, const Record& b) { return a.value < b.value; })
      ->value;
}

bool Group::any_rank(bool mine, const LocalOutcome& local) {
  return agree_on_largest(mine ? 1 : 0, local, "the entry into megamoe's backward operator") != 0;
}

void Group::all_reduce_sum(float* values, std::size_t count) {
  if (size() == 1) return;
  communicator_->all_reduce_sum(values, count, "the sum of weight gradients", inner_deadline_s_);
}

std::shared_ptr<BuiltLayer> Group::layer_for(LayerConfig config, std::int64_t num_tokens,
                                             const LocalOutcome& local) {
  const std::int64_t most_tokens =
      agree_on_largest(num_tokens, local, "the entry into megamoe's forward operator");
  config.entry_deadline_s = entry_deadline_s_;
  config.inner_deadline_s = inner_deadline_s_;
  // Ranks that differ must learn it before one of them builds a layer and another does not.
  if (size() > 1) agree_on_config(config, *communicator_);

  std::shared_ptr<BuiltLayer>& built = layers_[key_of(config)];
  const bool grows_by_need = config.shape.max_tokens == 0;
  if (grows_by_need) {
    const auto need = static_cast<std::uint64_t>(std::max(most_tokens, kSmallestMaxTokens));
    config.shape.max_tokens = static_cast<std::int64_t>(std::bit_ceil(need));
  }
  const bool large_enough =
      built != nullptr && built->layer.config().shape.max_tokens >= config.shape.max_tokens;
  if (!large_enough) {
    built = nullptr;  // before the larger one: memory for both is not needed, unless calls hold it
    built = std::make_shared<BuiltLayer>(config, communicator_, workspace_for(config));
  }
  return built;
}

std::shared_ptr<Workspace> Group::workspace_for(const LayerConfig& config) {
  const WorkspaceBytes need = workspace_bytes(config, size());
  for (const auto& workspace : workspaces_) {
    if (fits(need, workspace->bytes())) return workspace;
  }
  // Layers that were built on a smaller one keep it alive; new layers take the larger one.
  std::erase_if(workspaces_, [&](const std::shared_ptr<Workspace>& workspace) {
    return fits(workspace->bytes(), need);
  });
  workspaces_.push_back(std::make_shared<Workspace>(config, *communicator_));
  return workspaces_.back();
}

std::shared_ptr<Group> find_group(const std::string& name) {
  Groups& groups = Groups::instance();
  const std::lock_guard lock(groups.mutex);
  const auto found = groups.entries.find(name);
  if (found == groups.entries.end()) {
    throw Error(ErrorCode::invalid_argument,
                "group \"" + name + "\" is unknown; call megamoe.init(group) first, on all ranks");
  }
  return found->second;
}

bool has_group(const std::string& name) {
  Groups& groups = Groups::instance();
  const std::lock_guard lock(groups.mutex);
  return groups.entries.contains(name);
}

void put_group(const std::string& name, std::shared_ptr<Group> group) {
  Groups& groups = Groups::instance();
  const std::lock_guard lock(groups.mutex);
  groups.entries[name] = std::move(group);
}

void drop_group(const std::string& name) {
  Groups& groups = Groups::instance();
  const std::lock_guard lock(groups.mutex);
  groups.entries.erase(name);
}

void* keep_call(std::unique_ptr<PendingCall> call) {
  Calls& calls = Calls::instance();
  void* key = call->rows_per_expert.data();
  const std::lock_guard lock(calls.mutex);
  calls.entries.emplace(key, std::move(call));
  return key;
}

void release_call(void* key) noexcept {
  Calls& calls = Calls::instance();
  std::unique_ptr<PendingCall> call;
  {
    const std::lock_guard lock(calls.mutex);
    const auto found = calls.entries.find(key);
    if (found == calls.entries.end()) return;
    call = std::move(found->second);
    calls.entries.erase(found);
  }
  // Destroyed outside of the lock.
}

PendingCall* find_call(const void* key) {
  Calls& calls = Calls::instance();
  const std::lock_guard lock(calls.mutex);
  const auto found = calls.entries.find(key);
  return found == calls.entries.end() ? nullptr : found->second.get();
}

std::int64_t num_kept_calls() {
  Calls& calls = Calls::instance();
  const std::lock_guard lock(calls.mutex);
  return static_cast<std::int64_t>(calls.entries.size());
}

}  // namespace megamoe::torch_ops
