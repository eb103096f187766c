// What the operators share behind a group's name: its communicator, the layers built on it, and the
// contexts of forward calls that wait for their backward call.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "layer/agreement.h"
#include "megamoe/cuda.h"
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

using LayerKey = std::array<std::int64_t, 13>;

/// The layers of a group whose memory is the host's, or one device's, and the workspaces that they
/// share.
class LayerCache {
 public:
  explicit LayerCache(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  /// Null where none has been built for the configuration as the caller chose it.
  std::shared_ptr<BuiltLayer>& find(const LayerConfig& as_chosen);
  /// Collective.
  std::shared_ptr<BuiltLayer> build(const LayerConfig& config);
  /// Before a larger layer takes its place. Graphs use the one that they were captured with, so
  /// that is kept until there are none.
  void drop(std::shared_ptr<BuiltLayer>& built);
  /// Every layer, once, those that graphs alone use too.
  [[nodiscard]] std::vector<std::shared_ptr<BuiltLayer>> layers() const;

 private:
  std::shared_ptr<Workspace> workspace_for(const LayerConfig& config);

  std::shared_ptr<Communicator> communicator_;
  std::map<LayerKey, std::shared_ptr<BuiltLayer>> layers_;
  std::vector<std::shared_ptr<BuiltLayer>> in_graphs_;
  std::vector<std::shared_ptr<Workspace>> workspaces_;
};

/// Where a call on a device runs.
struct DevicePlace {
  int device;
  Stream stream;
};

using RanksOnDevice = std::function<std::unique_ptr<Communicator>(Communicator& host, int device)>;
/// `hosts`: how calls over several hosts run.
inline RanksOnDevice on_cuda_device(const CudaHostsOptions& hosts) {
  return [hosts](Communicator& host, int device) {
    return make_cuda_communicator(host, device, hosts);
  };
}

/// One expert-parallel group. All decisions about what is built depend on the calls alone, never on
/// what happens to be alive, so that all ranks take the same ones.
///
/// On the CPU every call begins with an exchange of the ranks' outcomes and token counts. On CUDA
/// calls exchange nothing on the host: a layer is built, and its capacity agreed on, in the first
/// call that needs it, which is the same one on all ranks. A rank that fails later, before its
/// call reaches the library, makes a call that the library refuses, and so its peers learn of it.
class Group {
 public:
  /// `ranks_on_device` gives this rank's communicator on a device; tests give one of the host.
  Group(std::shared_ptr<Communicator> communicator, double entry_deadline_s,
        double inner_deadline_s, RanksOnDevice ranks_on_device);

  [[nodiscard]] int rank() const { return host_->rank(); }
  [[nodiscard]] int size() const { return host_->size(); }
  /// One call at a time: a communicator serves one thread.
  [[nodiscard]] std::unique_lock<std::mutex> enter() { return std::unique_lock(mutex_); }

  /// Collective. The layer of Backend::cpu for `config`, built when there is none yet; `local` is
  /// how far this rank came on its own, and where it failed every rank throws.
  /// `config.shape.max_tokens` of 0 takes the next power of two above the T of every rank.
  /// Deadlines are the group's.
  std::shared_ptr<BuiltLayer> layer_for(LayerConfig config, std::int64_t num_tokens,
                                        const LocalOutcome& local);
  /// The layer of Backend::cuda; collective where there is none yet. `max_tokens` of 0 takes what
  /// is reserved or, where that is less than the T of any rank in the first call, the next power of
  /// two above that; a larger T is refused later, but a group of one rank grows. Throws what
  /// `local` says.
  std::shared_ptr<BuiltLayer> device_layer_for(LayerConfig config, std::int64_t num_tokens,
                                               const LocalOutcome& local, DevicePlace place);
  /// Throws where this rank failed before a call on a device that needs no new layer.
  void throw_after_refusal(const LocalOutcome& local, Stream stream);
  /// Collective. The least capacity of layers on devices whose `max_tokens` is 0.
  void reserve(std::int64_t max_tokens);
  /// Waits for this rank's calls on devices, the latest of which ran on `stream_of(device)` or on
  /// the stream that it was enqueued on, and throws what they reported. Nothing is reported twice.
  void check(const std::function<Stream(int device)>& stream_of);

  /// Collective. Whether `mine` holds on any rank; throws on every rank where one failed.
  bool any_rank(bool mine, const LocalOutcome& local);
  /// Collective: every value becomes the sum over ranks.
  void all_reduce_sum(float* values, std::size_t count);

 private:
  /// Returns the largest value of all ranks.
  std::int64_t agree_on_largest(std::int64_t value, const LocalOutcome& local, const char* what);
  /// Collective where the device is new.
  LayerCache& on_device(int device);
  void refuse_other_device(int device) const;
  /// Throws where ranks differ, before one of them builds a layer and another does not.
  void agree(const LayerConfig& config);

  std::shared_ptr<Communicator> host_;
  double entry_deadline_s_;
  double inner_deadline_s_;
  RanksOnDevice ranks_on_device_;
  std::mutex mutex_;
  LayerCache on_host_;
  std::map<int, LayerCache> on_devices_;  ///< several only for a group of one rank
  std::int64_t reserved_tokens_ = 0;
  std::shared_ptr<BuiltLayer> latest_;  ///< on a device
  Stream latest_stream_;
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
  /// On CUDA -1 each: only the device knows, and nobody waits for it.
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
