// Ranks on CUDA devices: a host group for meeting and agreeing, and memory that peers load and
// store.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/cuda/lsa_pointers.h"
#include "comm/cuda/nccl_library.h"
#include "comm/hardware_queues.h"
#include "cuda/device_check.h"
#include "cuda/runtime.h"
#include "cuda/stream_order.h"
#include "layer/agreement.h"
#include "megamoe/cuda.h"

namespace megamoe {
namespace {

using cuda::CurrentDevice;
using cuda::DeviceMemory;

constexpr double kConstructionDeadlineS = 600.0;

/// Throws on every rank what one of them met.
void agree(Communicator& group, const LocalOutcome& mine, const char* what, double deadline_s) {
  std::vector<LocalOutcome> outcomes(group.size());
  group.all_gather(&mine, outcomes.data(), sizeof(mine), what, deadline_s);
  for (int rank = 0; rank < group.size(); ++rank) {
    throw_if_failed(outcomes[rank], rank, group.rank());
  }
}

/// NCCL's communicator of a rank.
class NcclGroup {
 public:
  NcclGroup(const ncclUniqueId& id, int rank, int num_ranks) {
    nccl::check(nccl::library().comm_init_rank(&comm_, num_ranks, id, rank),
                "joining the group of " + std::to_string(num_ranks) + " devices");
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  ~NcclGroup() {
    // Destroying waits for peers, which may have gone.
    if (failed_) {
      nccl::library().comm_abort(comm_);
    } else {
      nccl::library().comm_destroy(comm_);
    }
  }

  void fail() { failed_ = true; }
  [[nodiscard]] ncclComm_t get() const { return comm_; }

 private:
  ncclComm_t comm_ = nullptr;
  bool failed_ = false;
};

/// Without cuMem NCCL registers a window that no kernel can read, and says that all is well.
bool is_on_device(ncclWindow_t window) {
  cudaPointerAttributes attributes{};
  const bool known = cudaPointerGetAttributes(&attributes, window) == cudaSuccess;
  cudaGetLastError();
  return window != nullptr && known && attributes.type == cudaMemoryTypeDevice;
}

/// Memory of NCCL's allocator in a symmetric window. Peers' parts are windows' addresses; the own
/// part has one address, that of the allocation.
class WindowHeap final : public SymmetricHeap {
 public:
  WindowHeap(std::shared_ptr<NcclGroup> nccl_group, Communicator& group, std::size_t bytes,
             int device, double deadline_s)
      : nccl_group_(std::move(nccl_group)), device_(device), bytes_(bytes) {
    constexpr const char* kWhat = "the allocation of a symmetric heap";
    const nccl::Library& library = nccl::library();
    const CurrentDevice current(device);
    try {
      agree(group, outcome_of([&] { allocate(bytes); }), kWhat, deadline_s);
      agree(group, outcome_of([&] {
              const ncclResult_t status = library.window_register(
                  nccl_group_->get(), memory_, allocated_, &window_, NCCL_WIN_COLL_SYMMETRIC);
              if (status != ncclSuccess || !is_on_device(window_)) {
                throw Error(ErrorCode::unsupported,
                            "NCCL gave no symmetric window of " + std::to_string(bytes) +
                                " bytes (" + library.get_error_string(status) +
                                "): windows need cuMem (is NCCL_CUMEM_ENABLE=0 set?) and devices "
                                "that reach each other by load and store");
              }
              peers_ = nccl::lsa_pointers(window_, group.size());
              peers_[group.rank()] = memory_;
            }),
            kWhat, deadline_s);
    } catch (...) {
      release();
      throw;
    }
  }
  WindowHeap(const WindowHeap&) = delete;
  WindowHeap& operator=(const WindowHeap&) = delete;
  ~WindowHeap() override { release(); }

  [[nodiscard]] std::byte* peer(int rank) const override { return peers_[rank]; }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

 private:
  void allocate(std::size_t bytes) {
    allocated_ = std::max<std::size_t>(bytes, 1);
    void* memory = nullptr;
    const ncclResult_t status = nccl::library().mem_alloc(&memory, allocated_);
    cudaGetLastError();
    if (status != ncclSuccess) {
      throw Error(ErrorCode::out_of_memory, "device " + std::to_string(device_) +
                                                " could not allocate a symmetric heap of " +
                                                std::to_string(bytes) + " bytes");
    }
    memory_ = static_cast<std::byte*>(memory);
    cuda::check(cudaMemset(memory_, 0, allocated_), "clearing a symmetric heap");
    cuda::check(cudaDeviceSynchronize(), "clearing a symmetric heap");
  }
  void release() {
    const CurrentDevice current(device_);
    if (window_ != nullptr) nccl::library().window_deregister(nccl_group_->get(), window_);
    if (memory_ != nullptr) nccl::library().mem_free(memory_);
  }

  std::shared_ptr<NcclGroup> nccl_group_;
  int device_;
  std::size_t bytes_;
  std::size_t allocated_ = 0;
  std::byte* memory_ = nullptr;
  ncclWindow_t window_ = nullptr;
  std::vector<std::byte*> peers_;
};

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
    for (const auto* memory : addresses) memory_R_.push_back(*memory);
    group.barrier(kWhat, deadline_s);  // `mine` has been copied by everybody
  }

  [[nodiscard]] std::byte* peer(int rank) const override { return memory_R_[rank]->data(); }
  [[nodiscard]] std::size_t bytes() const override { return bytes_; }

 private:
  std::size_t bytes_;
  std::vector<std::shared_ptr<DeviceMemory>> memory_R_;
};

/// One order for all ranks, which are threads of one process: that of rank 0.
std::shared_ptr<EnqueueOrder> shared_order(Communicator& group, const char* what) {
  const auto own = std::make_shared<EnqueueOrder>(group.size());
  const std::shared_ptr<EnqueueOrder>* address = &own;
  std::vector<const std::shared_ptr<EnqueueOrder>*> addresses(group.size());
  group.all_gather(static_cast<const void*>(&address), static_cast<void*>(addresses.data()),
                   sizeof(address), what, kConstructionDeadlineS);
  std::shared_ptr<EnqueueOrder> shared = *addresses[0];
  group.barrier(what, kConstructionDeadlineS);  // rank 0's has been copied by everybody
  return shared;
}

/// Where a rank runs.
struct Place {
  LocalOutcome outcome;
  std::int64_t process = 0;
  std::array<char, 16> device_uuid{};
};

/// `prepare` is what else may fail there.
template <class Prepare>
Place place_of(const Prepare& prepare, int device) {
  Place place;
  place.process = getpid();
  place.outcome = outcome_of([&] {
    const cudaDeviceProp properties = cuda::require_device(device);
    std::memcpy(place.device_uuid.data(), properties.uuid.bytes, place.device_uuid.size());
    prepare();
  });
  return place;
}

enum class Arrangement { one_device, device_each };

/// The same on every rank.
Arrangement arrangement_of(const std::vector<Place>& places) {
  std::map<std::array<char, 16>, int> first_on_device;
  int first = -1;
  int second = -1;
  bool one_process = true;
  for (int rank = 0; rank < static_cast<int>(places.size()); ++rank) {
    const auto [entry, is_new] = first_on_device.emplace(places[rank].device_uuid, rank);
    if (!is_new && second < 0) {
      first = entry->second;
      second = rank;
    }
    one_process = one_process && places[rank].process == places[0].process;
  }
  if (first_on_device.size() == 1 && one_process) return Arrangement::one_device;
  if (second < 0) return Arrangement::device_each;
  throw Error(ErrorCode::unsupported,
              "ranks " + std::to_string(first) + " and " + std::to_string(second) +
                  " are on the same CUDA device; ranks have a device each, or all share one and "
                  "are threads of one process");
}

class CudaCommunicator final : public cuda::OrderedCommunicator {
 public:
  CudaCommunicator(Communicator& group, int device) : group_(group), device_(device) {
    constexpr const char* kWhat = "the construction of a CUDA communicator";
    if (group.network() != nullptr) {
      throw Error(ErrorCode::unsupported, "backend cuda: ranks must be on one host; here are " +
                                              group.topology().describe() +
                                              " (the cpu backend takes that)");
    }
    const Place mine = place_of(
        [&] {
          const CurrentDevice current(device);
          calls_ = std::make_shared<cuda::RankCalls>(device, group);
        },
        device);
    std::vector<Place> places(group.size());
    group.all_gather(&mine, places.data(), sizeof(mine), kWhat, kConstructionDeadlineS);
    for (int rank = 0; rank < size(); ++rank)
      throw_if_failed(places[rank].outcome, rank, group.rank());
    if (arrangement_of(places) == Arrangement::one_device) {
      require_hardware_queues(size(), device);
      if (size() > 1) calls_->shared = shared_order(group, kWhat);
      return;
    }

    struct IdRecord {
      LocalOutcome outcome;
      ncclUniqueId id;
    };
    IdRecord record{};
    record.outcome = outcome_of([&] {
      const nccl::Library& library = nccl::library();
      if (group.rank() == 0) nccl::check(library.get_unique_id(&record.id), "a new NCCL group");
    });
    std::vector<IdRecord> records(group.size());
    group.all_gather(&record, records.data(), sizeof(record), kWhat, kConstructionDeadlineS);
    for (int rank = 0; rank < size(); ++rank) {
      throw_if_failed(records[rank].outcome, rank, group.rank());
    }
    const CurrentDevice current(device);
    agree(group, outcome_of([&] {
            nccl_group_ = std::make_shared<NcclGroup>(records[0].id, group.rank(), group.size());
          }),
          kWhat, kConstructionDeadlineS);
  }

  ~CudaCommunicator() override {
    calls_->watch.stop();
    if (calls_->has_failed && nccl_group_ != nullptr) nccl_group_->fail();
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
    if (nccl_group_ == nullptr) {
      return std::make_unique<SharedDeviceHeap>(group_, bytes, device_, deadline_s);
    }
    return std::make_unique<WindowHeap>(nccl_group_, group_, bytes, device_, deadline_s);
  }
  [[nodiscard]] std::vector<Departure> departures() const override { return group_.departures(); }
  [[nodiscard]] std::shared_ptr<cuda::RankCalls> calls() const override { return calls_; }
  void abort(const std::string& reason) noexcept override {
    if (nccl_group_ != nullptr) nccl_group_->fail();
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
      if (peers_gone && nccl_group_ != nullptr) nccl_group_->fail();
      throw;
    }
  }

  Communicator& group_;
  int device_;
  std::shared_ptr<cuda::RankCalls> calls_;
  std::shared_ptr<NcclGroup> nccl_group_;  ///< null where all ranks share a device
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

std::unique_ptr<Communicator> make_cuda_communicator(Communicator& group, int device) {
  return std::make_unique<CudaCommunicator>(group, device);
}

}  // namespace megamoe
