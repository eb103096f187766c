#include "comm/cuda/window_heap.h"

#include <algorithm>
#include <string>
#include <utility>

#include "comm/cuda/lsa_pointers.h"
#include "comm/cuda/nccl_library.h"
#include "comm/cuda/ranks_of_host.h"
#include "comm/cuda/reach.h"
#include "cuda/runtime.h"
#include "layer/agreement.h"

namespace megamoe::nccl {
namespace {

using cuda::CurrentDevice;
using cuda::RanksOfHost;

Members members_of(const Communicator& group, const std::uint32_t* has_left_R) {
  const RanksOfHost host(group);
  Members members{group.rank(), {}, "on this host", has_left_R};
  for (int index = 0; index < host.count; ++index) members.ranks.push_back(host.first + index);
  return members;
}

bool is_on_device(const void* memory) {
  cudaPointerAttributes attributes{};
  const bool known = cudaPointerGetAttributes(&attributes, memory) == cudaSuccess;
  cudaGetLastError();
  return memory != nullptr && known && attributes.type == cudaMemoryTypeDevice;
}

void free_memory(const WindowMemory& memory) {
  if (memory.data != nullptr) library().mem_free(memory.data);
}

}  // namespace

WindowGroup::WindowGroup(const ncclUniqueId& id, const Communicator& group,
                         std::vector<int> devices_R, const std::uint32_t* has_left_R,
                         double deadline_s)
    : devices_R_(std::move(devices_R)),
      communicator_(id, members_of(group, has_left_R), NCCL_CONFIG_INITIALIZER, deadline_s) {}

WindowGroup::~WindowGroup() {
  const CurrentDevice current(device());
  if (has_failed_) communicator_.abort();
  for (const auto& memory : unfinished_) free_memory(*memory);
}

void WindowGroup::make_window(std::unique_ptr<WindowMemory>& memory, double deadline_s) {
  try {
    communicator_.settle(library().window_register(communicator_.get(), memory->data, memory->bytes,
                                                   &memory->window, NCCL_WIN_COLL_SYMMETRIC),
                         "a symmetric window", deadline_s);
  } catch (const Error& error) {
    const std::size_t bytes = memory->bytes;
    fail();
    unfinished_.push_back(std::move(memory));
    if (error.code() == ErrorCode::internal) throw no_window(bytes, error.what());
    throw;
  }
}

Error WindowGroup::no_window(std::size_t bytes, const std::string& reason) const {
  const Members& members = communicator_.members();
  std::vector<int> peers = members.ranks;
  std::erase(peers, members.rank);
  return {ErrorCode::unsupported,
          "NCCL gave no symmetric window of " + std::to_string(bytes) + " bytes to " +
              cuda::seats_text({members.rank}, devices_R_) + " and " +
              cuda::seats_text(peers, devices_R_) + " (" + reason +
              "): it needs cuMem (is NCCL_CUMEM_ENABLE=0 set?), and devices that load and store in "
              "each other's memory. " +
              cuda::advice_on_reach()};
}

std::vector<std::byte*> WindowGroup::pointers_of(const WindowMemory& memory) const {
  // Without cuMem NCCL registers a window that no kernel can read, and says that all is well.
  if (!is_on_device(memory.window)) throw no_window(memory.bytes, "it is not on the device");
  const Members& members = communicator_.members();
  const auto pointers = lsa_pointers(memory.window, static_cast<int>(members.ranks.size()));
  std::vector<int> unreached;
  for (std::size_t index = 0; index < pointers.size(); ++index) {
    const int peer = members.ranks[index];
    // NCCL makes a window also where some ranks do not reach each other, and maps those that do.
    if (peer != members.rank && !is_on_device(pointers[index])) unreached.push_back(peer);
  }
  if (!unreached.empty()) {
    throw cuda::out_of_reach(members.rank, unreached, devices_R_,
                             "NCCL has mapped none for loads and stores");
  }
  return pointers;
}

void WindowGroup::release(std::unique_ptr<WindowMemory> memory) {
  if (memory == nullptr) return;
  const CurrentDevice current(device());
  const bool is_at_work = !unfinished_.empty();
  if (memory->window != nullptr && !is_at_work) {
    library().window_deregister(communicator_.get(), memory->window);
  }
  free_memory(*memory);
}

WindowHeap::WindowHeap(std::shared_ptr<WindowGroup> windows, Communicator& group, std::size_t bytes,
                       double deadline_s)
    : windows_(std::move(windows)), bytes_(bytes) {
  constexpr const char* kWhat = "the allocation of a symmetric heap";
  const CurrentDevice current(windows_->device());
  try {
    agree(group, outcome_of([&] { allocate(); }), kWhat, deadline_s);
    agree_or_leave(group, outcome_of([&] { windows_->make_window(memory_, deadline_s); }), kWhat,
                   deadline_s);
    agree(group, outcome_of([&] {
            const auto pointers = windows_->pointers_of(*memory_);
            const RanksOfHost host(group);
            peers_.assign(group.size(), nullptr);
            std::copy(pointers.begin(), pointers.end(), peers_.begin() + host.first);
            peers_[group.rank()] = static_cast<std::byte*>(memory_->data);
          }),
          kWhat, deadline_s);
  } catch (...) {
    windows_->release(std::move(memory_));
    throw;
  }
}

WindowHeap::~WindowHeap() { windows_->release(std::move(memory_)); }

void WindowHeap::allocate() {
  auto memory = std::make_unique<WindowMemory>();
  memory->bytes = std::max<std::size_t>(bytes_, 1);
  const ncclResult_t status = library().mem_alloc(&memory->data, memory->bytes);
  cudaGetLastError();
  if (status != ncclSuccess) {
    throw Error(ErrorCode::out_of_memory, "device " + std::to_string(windows_->device()) +
                                              " could not allocate a symmetric heap of " +
                                              std::to_string(bytes_) + " bytes");
  }
  memory_ = std::move(memory);
  cuda::check(cudaMemset(memory_->data, 0, memory_->bytes), "clearing a symmetric heap");
  cuda::check(cudaDeviceSynchronize(), "clearing a symmetric heap");
}

}  // namespace megamoe::nccl
