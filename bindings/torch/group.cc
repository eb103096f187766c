#include "group.h"

#include <algorithm>
#include <bit>
#include <unordered_map>
#include <utility>

#include "layer/fingerprint.h"

namespace megamoe::torch_ops {
namespace {

/// Token counts below this share one layer.
constexpr std::int64_t kSmallestMaxTokens = 64;
constexpr const char* kFirstCall = "megamoe's first call of a layer on CUDA";

/// Everything of a configuration that a caller chose.
LayerKey key_of(const LayerConfig& config) {
  return {config.shape.hidden_dim,
          config.shape.intermediate_dim,
          config.shape.num_experts,
          config.shape.top_k,
          config.shape.max_tokens,
          static_cast<std::int64_t>(config.activation.kind),
          std::bit_cast<std::int32_t>(config.activation.limit),
          static_cast<std::int64_t>(config.memory_mode),
          static_cast<std::int64_t>(config.overlap),
          static_cast<std::int64_t>(config.weight_gradient_mode),
          static_cast<std::int64_t>(config.backend),
          config.row_capacity,
          config.num_sms};
}

bool fits(const WorkspaceBytes& need, const WorkspaceBytes& have) {
  return need.symmetric <= have.symmetric && need.local <= have.local;
}

/// The capacity that a layer sized by need gets.
std::int64_t rounded_up(std::int64_t num_tokens) {
  const auto need = static_cast<std::uint64_t>(std::max(num_tokens, kSmallestMaxTokens));
  return static_cast<std::int64_t>(std::bit_ceil(need));
}

/// 0 where there is no layer.
std::int64_t capacity_of(const std::shared_ptr<BuiltLayer>& built) {
  return built == nullptr ? 0 : built->layer.config().shape.max_tokens;
}

void refuse_more_tokens(std::int64_t num_tokens, std::int64_t capacity, bool sized_by_need) {
  if (num_tokens <= capacity) return;
  throw Error(ErrorCode::invalid_argument,
              "x has " + std::to_string(num_tokens) + " tokens; " +
                  (sized_by_need ? "the layer was built for " + std::to_string(capacity) +
                                       " in its first call: call megamoe.reserve(max_tokens, "
                                       "group) on all ranks, or give max_tokens"
                                 : "shape.max_tokens is " + std::to_string(capacity)));
}

/// A communicator on a device, and the one of the host that it meets through.
struct DeviceCommunicator {
  std::shared_ptr<Communicator> host;
  std::unique_ptr<Communicator> device;
};

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

std::shared_ptr<BuiltLayer>& LayerCache::find(const LayerConfig& as_chosen) {
  return layers_[key_of(as_chosen)];
}

std::shared_ptr<BuiltLayer> LayerCache::build(const LayerConfig& config) {
  return std::make_shared<BuiltLayer>(config, communicator_, workspace_for(config));
}

void LayerCache::drop(std::shared_ptr<BuiltLayer>& built) {
  std::erase_if(in_graphs_, [](const auto& layer) { return !layer->layer.is_in_graph(); });
  if (built != nullptr && built->layer.is_in_graph()) in_graphs_.push_back(built);
  built = nullptr;
}

std::vector<std::shared_ptr<BuiltLayer>> LayerCache::layers() const {
  std::vector<std::shared_ptr<BuiltLayer>> all = in_graphs_;
  for (const auto& [key, layer] : layers_) {
    if (layer != nullptr) all.push_back(layer);
  }
  return all;
}

std::shared_ptr<Workspace> LayerCache::workspace_for(const LayerConfig& config) {
  const WorkspaceBytes need = workspace_bytes(config, communicator_->topology());
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

Group::Group(std::shared_ptr<Communicator> communicator, double entry_deadline_s,
             double inner_deadline_s, RanksOnDevice ranks_on_device)
    : host_(std::move(communicator)),
      entry_deadline_s_(entry_deadline_s),
      inner_deadline_s_(inner_deadline_s),
      ranks_on_device_(std::move(ranks_on_device)),
      on_host_(host_) {}

std::int64_t Group::agree_on_largest(std::int64_t value, const LocalOutcome& local,
                                     const char* what) {
  struct Record {
    LocalOutcome outcome;
    std::int64_t value;
  };
  const Record mine{local, value};
  std::vector<Record> all(size(), mine);
  if (size() > 1) {
    host_->all_gather(&mine, all.data(), sizeof(Record), what, entry_deadline_s_);
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
  host_->all_reduce_sum(values, count, "the sum of weight gradients", inner_deadline_s_);
}

void Group::agree(const LayerConfig& config) {
  if (size() > 1) agree_on_config(config, *host_);
}

std::shared_ptr<BuiltLayer> Group::layer_for(LayerConfig config, std::int64_t num_tokens,
                                             const LocalOutcome& local) {
  const std::int64_t most_tokens =
      agree_on_largest(num_tokens, local, "the entry into megamoe's forward operator");
  config.entry_deadline_s = entry_deadline_s_;
  config.inner_deadline_s = inner_deadline_s_;
  agree(config);

  std::shared_ptr<BuiltLayer>& built = on_host_.find(config);
  if (config.shape.max_tokens == 0) config.shape.max_tokens = rounded_up(most_tokens);
  if (capacity_of(built) < config.shape.max_tokens) {
    built = nullptr;  // before the larger one: memory for both is not needed, unless calls hold it
    built = on_host_.build(config);
  }
  return built;
}

LayerCache& Group::on_device(int device) {
  const auto found = on_devices_.find(device);
  if (found != on_devices_.end()) return found->second;
  auto both = std::make_shared<DeviceCommunicator>();
  both->host = host_;
  both->device = ranks_on_device_(*host_, device);
  Communicator* communicator = both->device.get();
  return on_devices_
      .try_emplace(device, std::shared_ptr<Communicator>(std::move(both), communicator))
      .first->second;
}

std::shared_ptr<BuiltLayer> Group::device_layer_for(LayerConfig config, std::int64_t num_tokens,
                                                    const LocalOutcome& local, DevicePlace place) {
  config.entry_deadline_s = entry_deadline_s_;
  config.inner_deadline_s = inner_deadline_s_;
  const bool sized_by_need = config.shape.max_tokens == 0;
  const bool may_grow = sized_by_need && size() == 1;
  throw_after_refusal(local, place.stream);
  throw_after_refusal(outcome_of([&] { refuse_other_device(place.device); }), place.stream);
  const bool is_first = !on_devices_.contains(place.device);
  const std::int64_t capacity =
      is_first ? 0 : capacity_of(on_devices_.at(place.device).find(config));
  const bool is_new = capacity == 0 || (sized_by_need && capacity < reserved_tokens_);
  std::int64_t most_tokens = num_tokens;
  if (is_new) {
    most_tokens = agree_on_largest(num_tokens, local, kFirstCall);
    agree(config);
  } else if (!may_grow) {
    throw_after_refusal(
        outcome_of([&] { refuse_more_tokens(num_tokens, capacity, sized_by_need); }), place.stream);
  }
  LayerCache& cache = on_device(place.device);
  std::shared_ptr<BuiltLayer>& built = cache.find(config);
  if (is_new || (may_grow && num_tokens > capacity)) {
    if (sized_by_need) {
      config.shape.max_tokens =
          most_tokens <= reserved_tokens_ ? reserved_tokens_ : rounded_up(most_tokens);
    }
    cache.drop(built);
    latest_ = nullptr;
    built = cache.build(config);
  }
  latest_ = built;
  latest_stream_ = place.stream;
  return built;
}

void Group::refuse_other_device(int device) const {
  if (size() == 1 || on_devices_.empty() || on_devices_.contains(device)) return;
  throw Error(ErrorCode::invalid_argument, "the tensors are on CUDA device " +
                                               std::to_string(device) +
                                               "; this rank of the group runs on device " +
                                               std::to_string(on_devices_.begin()->first));
}

void Group::throw_after_refusal(const LocalOutcome& local, Stream stream) {
  if (local.failed == 0) return;
  if (size() > 1 && latest_ == nullptr) {
    agree_on_largest(0, local, kFirstCall);
  } else if (size() > 1) {
    // Absent tensors: the library tells the peers, and what it says here is not what went wrong.
    outcome_of([&] { latest_->layer.forward({}, {}, stream); });
  }
  throw_if_failed(local, rank(), rank());
}

void Group::reserve(std::int64_t max_tokens) {
  const std::int64_t most = agree_on_largest(max_tokens, {}, "megamoe.reserve");
  reserved_tokens_ = std::max(reserved_tokens_, most);
}

void Group::check(const std::function<Stream(int device)>& stream_of) {
  LocalOutcome first;
  for (const auto& [device, cache] : on_devices_) {
    for (const Stream stream : {latest_stream_, stream_of(device)}) {
      for (const auto& built : cache.layers()) {
        const LocalOutcome outcome = outcome_of([&] { built->layer.check(stream); });
        if (first.failed == 0) first = outcome;
      }
    }
  }
  throw_if_failed(first, rank(), rank());
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
  groups.entries[name].swap(
      group);  // what was there is destroyed by the caller, outside of the lock
}

void drop_group(const std::string& name) {
  Groups& groups = Groups::instance();
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(groups.mutex);
    const auto found = groups.entries.find(name);
    if (found == groups.entries.end()) return;
    group = std::move(found->second);
    groups.entries.erase(found);
  }
  // Destroyed outside of the lock.
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
