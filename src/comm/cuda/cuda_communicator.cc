// Ranks on CUDA devices: a host group for meeting and agreeing, memory that the peers of a host
// load and store, and what joins hosts.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "comm/cuda/nccl_library.h"
#include "comm/cuda/nccl_link.h"
#include "comm/cuda/places.h"
#include "comm/cuda/ranks_of_host.h"
#include "comm/cuda/reach.h"
#include "comm/cuda/stand_in_link.h"
#include "comm/cuda/window_heap.h"
#include "comm/hardware_queues.h"
#include "cuda/runtime.h"
#include "cuda/stream_order.h"
#include "layer/agreement.h"
#include "megamoe/cuda.h"

namespace megamoe {
namespace {

using cuda::Arrangement;
using cuda::CurrentDevice;
using cuda::DeviceMemory;
using cuda::HostsAre;
using cuda::Place;
using cuda::RanksOfHost;

constexpr double kConstructionDeadlineS = 600.0;

/// Plain memory of ranks that are threads of one process on one device. Lives until the last rank
/// has given its heap up.
class SharedDeviceHeap final : public SymmetricHeap {
 public:
  SharedDeviceHeap(Communicator& group, std::size_t bytes, int device, double deadline_s)
      : bytes_(bytes) {
    constexpr const char* kWhat = "the allocation of a symmetric heap";
    std::shared_ptr<DeviceMemory> mine;
    agree(group, outcome_of([&] {
            mine = std::make_shared<DeviceMemory>(device, static_cast<std::int64_t>(bytes),
                                                  "a symmetric heap");
            const CurrentDevice current(device);
            cuda::check(cudaMemset(mine->data(), 0, bytes), "clearing a symmetric heap");
            cuda::check(cudaStreamSynchronize(nullptr), "clearing a symmetric heap");
          }),
          kWhat, deadline_s);
    const std::shared_ptr<DeviceMemory>* address = &mine;
    std::vector<const std::shared_ptr<DeviceMemory>*> addresses(group.size());
    group.all_gather(static_cast<const void*>(&address), static_cast<void*>(addresses.data()),
                     sizeof(address), kWhat, deadline_s);
    const RanksOfHost host(group);
    memory_R_.resize(group.size());
    for (int rank = host.first; rank < host.first + host.count; ++rank) {
      memory_R_[rank] = *addresses[rank];
    }
    group.barrier(kWhat, deadline_s);  // `mine` has been copied by everybody
  }

  [[nodiscard]] std::byte* peer(int rank) const override {
    return memory_R_[rank] == nullptr ? nullptr : memory_R_[rank]->data();
  }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

 private:
  std::size_t bytes_;
  std::vector<std::shared_ptr<DeviceMemory>> memory_R_;
};

/// One order for the ranks of a host that share a device, as threads of one process: that of the
/// host's first rank. Nobody waits in it for ranks of other hosts. Null where each has a device.
std::shared_ptr<EnqueueOrder> order_of_host(Communicator& group, Arrangement arrangement,
                                            const char* what) {
  const RanksOfHost host(group);
  const auto own = std::make_shared<EnqueueOrder>(group.size());
  for (int rank = 0; rank < group.size(); ++rank) {
    if (!host.has(rank)) own->reach(rank, std::numeric_limits<std::uint64_t>::max());
  }
  const std::shared_ptr<EnqueueOrder>* address = &own;
  std::vector<const std::shared_ptr<EnqueueOrder>*> addresses(group.size());
  group.all_gather(static_cast<const void*>(&address), static_cast<void*>(addresses.data()),
                   sizeof(address), what, kConstructionDeadlineS);
  std::shared_ptr<EnqueueOrder> shared;
  if (arrangement == Arrangement::one_device) shared = *addresses[host.first];
  group.barrier(what, kConstructionDeadlineS);  // the first one's has been copied by everybody
  return shared;
}

class CudaCommunicator final : public cuda::OrderedCommunicator {
 public:
  CudaCommunicator(Communicator& group, int device, const CudaHostsOptions& options)
      : group_(group), device_(device) {
    CudaHostsOptions resolved_options;
    Place mine = cuda::place_of(device, [&] {
      resolved_options = cuda::resolved(options);
      const CurrentDevice current(device);
      calls_ = std::make_shared<cuda::RankCalls>(device, group);
    });
    mine.options = resolved_options;
    num_groups_ = resolved_options.network_groups;
    std::vector<Place> places(group.size());
    group.all_gather(&mine, places.data(), sizeof(mine), kWhat, kConstructionDeadlineS);
    for (int rank = 0; rank < size(); ++rank)
      throw_if_failed(places[rank].outcome, rank, group.rank());
    cuda::require_equal_options(places);
    const Topology topology = group.topology();
    const std::vector<Arrangement> arrangements = cuda::arrangements_of(places, topology);
    require_hardware_queues(cuda::ranks_beside(places, group.rank()), device);
    const bool any_window =
        std::count(arrangements.begin(), arrangements.end(), Arrangement::device_each) > 0;
    const bool has_hosts = topology.num_hosts() > 1;
    const int host = topology.host_of(group.rank());
    const bool any_order =
        topology.ranks_per_host() > 1 &&
        std::count(arrangements.begin(), arrangements.end(), Arrangement::one_device) > 0;
    if (any_order) calls_->shared = order_of_host(group, arrangements[host], kWhat);
    const HostsAre hosts = has_hosts ? cuda::hosts_are(places, topology) : HostsAre::threads;
    const bool has_nccl_link = has_hosts && hosts == HostsAre::processes;

    if (any_window) {
      agree(group, outcome_of([&] {
              if (arrangements[host] == Arrangement::one_device) return;
              cuda::require_reach(places, topology, group.rank(), cuda::reach_of(device));
            }),
            kWhat, kConstructionDeadlineS);
    }
    std::vector<IdRecord> records;
    if (any_window || has_nccl_link) records = exchange_ids(topology);
    const CurrentDevice current(device);
    if (any_window) {
      agree_or_leave(group, outcome_of([&] {
                       if (arrangements[host] == Arrangement::one_device) return;
                       windows_ = std::make_shared<nccl::WindowGroup>(
                           records[topology.rank_of(host, 0)].of_host, group,
                           cuda::devices_of(places), calls_->has_left_R.get(),
                           kConstructionDeadlineS);
                     }),
                     kWhat, kConstructionDeadlineS);
    }
    if (has_nccl_link) {
      // A first message allocates and loads code, which may wait for kernels of ranks beside this
      // one, and those for their peers: ranks that share a device have it one after the other.
      const int index = topology.local_index_of(group.rank());
      const int num_turns = any_order ? topology.ranks_per_host() : 1;
      for (int turn = 0; turn < num_turns; ++turn) {
        agree_or_leave(group, outcome_of([&] {
                         if (num_turns > 1 && turn != index) return;
                         link_ = std::make_unique<nccl::NcclLink>(
                             records[topology.rank_of(0, index)].of_index, topology, group.rank(),
                             resolved_options.network_ctas, calls_->has_left_R.get(),
                             kConstructionDeadlineS);
                       }),
                       kWhat, kConstructionDeadlineS);
      }
      bytes_per_s_ = slowest_link();
    } else if (has_hosts) {
      join_threads(topology, places);
    }
  }

  ~CudaCommunicator() override {
    calls_->watch.stop();
    if (!calls_->has_failed) return;
    if (windows_ != nullptr) windows_->fail();
    if (link_ != nullptr) link_->fail(Error(ErrorCode::peer_failed, "a call has failed for good"));
  }

  [[nodiscard]] int rank() const override { return group_.rank(); }
  [[nodiscard]] int size() const override { return group_.size(); }
  [[nodiscard]] int device() const override { return device_; }

  void barrier(const char* what, double deadline_s) override {
    note_failure([&] { group_.barrier(what, deadline_s); });
  }
  void all_gather(const void* mine, void* all, std::size_t bytes, const char* what,
                  double deadline_s) override {
    note_failure([&] { group_.all_gather(mine, all, bytes, what, deadline_s); });
  }
  void all_reduce_sum(float* values, std::size_t count, const char* what,
                      double deadline_s) override {
    note_failure([&] { group_.all_reduce_sum(values, count, what, deadline_s); });
  }
  std::unique_ptr<SymmetricHeap> allocate_symmetric(std::size_t bytes, double deadline_s) override {
    if (windows_ == nullptr) {
      return std::make_unique<SharedDeviceHeap>(group_, bytes, device_, deadline_s);
    }
    return std::make_unique<nccl::WindowHeap>(windows_, group_, bytes, deadline_s);
  }
  [[nodiscard]] std::vector<Departure> departures() const override { return group_.departures(); }
  [[nodiscard]] Topology topology() const override { return group_.topology(); }
  [[nodiscard]] std::shared_ptr<cuda::RankCalls> calls() const override { return calls_; }
  [[nodiscard]] cuda::HostConnection hosts() const override {
    return {link_.get(), num_groups_, bytes_per_s_};
  }
  void abort(const std::string& reason) noexcept override {
    if (windows_ != nullptr) windows_->fail();
    if (link_ != nullptr) link_->fail(Error(ErrorCode::peer_failed, reason));
    group_.abort(reason);
  }

 private:
  template <class Work>
  void note_failure(Work&& work) {
    try {
      work();
    } catch (const Error& error) {
      const bool peers_gone =
          error.code() == ErrorCode::peer_failed || error.code() == ErrorCode::deadline_exceeded;
      if (peers_gone && windows_ != nullptr) windows_->fail();
      throw;
    }
  }

  static constexpr const char* kWhat = "the construction of a CUDA communicator";

  struct IdRecord {
    LocalOutcome outcome;
    ncclUniqueId of_host;   ///< of a host's first rank: its ranks' group
    ncclUniqueId of_index;  ///< of a rank of the first host: the ranks with its index
  };

  std::vector<IdRecord> exchange_ids(const Topology& topology) {
    IdRecord record{};
    record.outcome = outcome_of([&] {
      const nccl::Library& library = nccl::library();
      if (topology.local_index_of(group_.rank()) == 0) {
        nccl::check(library.get_unique_id(&record.of_host), "a new NCCL group");
      }
      if (topology.num_hosts() > 1 && topology.host_of(group_.rank()) == 0) {
        nccl::check(library.get_unique_id(&record.of_index), "a new NCCL group");
      }
    });
    std::vector<IdRecord> records(group_.size());
    group_.all_gather(&record, records.data(), sizeof(record), kWhat, kConstructionDeadlineS);
    for (int rank = 0; rank < size(); ++rank) {
      throw_if_failed(records[rank].outcome, rank, group_.rank());
    }
    return records;
  }

  double slowest_link() {
    const double mine = link_->bytes_per_s();
    std::vector<double> all(group_.size());
    group_.all_gather(&mine, all.data(), sizeof mine, kWhat, kConstructionDeadlineS);
    return *std::min_element(all.begin(), all.end());
  }

  /// The ranks of the first host make what those with their index share.
  void join_threads(const Topology& topology, const std::vector<Place>& places) {
    std::shared_ptr<cuda::StandInNetwork> mine;
    if (topology.host_of(group_.rank()) == 0) {
      mine = std::make_shared<cuda::StandInNetwork>(topology.num_hosts());
    }
    const std::shared_ptr<cuda::StandInNetwork>* address = &mine;
    std::vector<const std::shared_ptr<cuda::StandInNetwork>*> addresses(group_.size());
    group_.all_gather(static_cast<const void*>(&address), static_cast<void*>(addresses.data()),
                      sizeof(address), kWhat, kConstructionDeadlineS);
    agree(group_, outcome_of([&] {
            const int first = topology.rank_of(0, topology.local_index_of(group_.rank()));
            link_ = std::make_unique<cuda::StandInLink>(*addresses[first], topology, group_.rank(),
                                                        cuda::devices_of(places),
                                                        calls_->has_left_R.get());
          }),
          kWhat, kConstructionDeadlineS);  // after it `mine` has been copied by everybody
  }

  Communicator& group_;
  int device_;
  int num_groups_ = 0;
  double bytes_per_s_ = 0.0;
  std::shared_ptr<cuda::RankCalls> calls_;
  std::shared_ptr<nccl::WindowGroup> windows_;  ///< null where all ranks of the host share a device
  std::unique_ptr<cuda::HostLink> link_;        ///< null on one host
};

}  // namespace

int num_cuda_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::unique_ptr<Communicator> make_cuda_communicator(Communicator& group, int device,
                                                     const CudaHostsOptions& hosts) {
  return std::make_unique<CudaCommunicator>(group, device, hosts);
}

}  // namespace megamoe
