#include "comm/cuda/nccl_link.h"

#include <utility>

#include "comm/cuda/nccl_library.h"

namespace megamoe::nccl {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{20};
/// Bytes that are sent to every host at the construction, so that NCCL connects and the link is
/// measured.
constexpr std::int64_t kGreetingBytes = std::int64_t{4} << 20;

Members members_of(const Topology& topology, int rank, const std::uint32_t* has_left_R) {
  Members members{rank, {}, "by network", has_left_R};
  for (int host = 0; host < topology.num_hosts(); ++host) {
    members.ranks.push_back(topology.rank_of(host, topology.local_index_of(rank)));
  }
  return members;
}

ncclConfig_t config_with(int max_ctas) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = max_ctas;
  return config;
}

}  // namespace

NcclLink::NcclLink(const ncclUniqueId& id, const Topology& topology, int rank, int max_ctas,
                   const std::uint32_t* has_left_R, double deadline_s)
    : own_host_(topology.host_of(rank)),
      max_ctas_(max_ctas),
      communicator_(id, members_of(topology, rank, has_left_R), config_with(max_ctas), deadline_s) {
  cuda::check(cudaGetDevice(&device_), "cudaGetDevice");
  connect(deadline_s);
  watcher_ = std::thread([this] { watch(); });
}

NcclLink::~NcclLink() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  wake_.notify_one();
  if (watcher_.joinable()) watcher_.join();
}

void NcclLink::throw_if_over() const {
  if (failure_) throw Error(*failure_);
}

void NcclLink::send_and_receive(std::span<const cuda::HostMessage> sends,
                                std::span<const cuda::HostMessage> receives, const char* what,
                                double deadline_s, cudaStream_t stream) {
  const Library& nccl = library();
  ncclResult_t result = nccl.group_start();
  const auto add = [&](ncclResult_t next) {
    if (result == ncclSuccess || result == ncclInProgress) result = next;
  };
  for (const cuda::HostMessage& message : sends) {
    add(nccl.send(message.data, message.bytes, ncclInt8, message.host, communicator_.get(),
                  stream));
  }
  for (const cuda::HostMessage& message : receives) {
    add(nccl.recv(message.data, message.bytes, ncclInt8, message.host, communicator_.get(),
                  stream));
  }
  add(nccl.group_end());  // also after a failure: the thread must leave the group
  try {
    communicator_.settle(result, what, deadline_s);
  } catch (const Error& error) {
    end(error);
    throw;
  }
}

/// The first message between two ranks allocates memory and loads code, which may wait for kernels
/// that run: it must not be one of a call.
void NcclLink::connect(double deadline_s) {
  const auto num_peers = static_cast<std::int64_t>(communicator_.members().ranks.size()) - 1;
  const cuda::DeviceMemory memory(device_, 2 * num_peers * kGreetingBytes, "greetings of hosts");
  greet(memory, 1, deadline_s);
  greet(memory, kGreetingBytes, deadline_s);
  const double seconds = greet(memory, kGreetingBytes, deadline_s);
  bytes_per_s_ = static_cast<double>(num_peers * kGreetingBytes) / seconds;
}

double NcclLink::greet(const cuda::DeviceMemory& memory, std::int64_t bytes, double deadline_s) {
  constexpr const char* kWhat = "the first message";
  const auto num_hosts = static_cast<int>(communicator_.members().ranks.size());
  std::vector<cuda::HostMessage> sends;
  std::vector<cuda::HostMessage> receives;
  std::byte* data = memory.data();
  for (int host = 0; host < num_hosts; ++host) {
    if (host == own_host_) continue;
    sends.push_back({host, data, bytes});
    receives.push_back({host, data + kGreetingBytes, bytes});
    data += 2 * kGreetingBytes;
  }
  const cuda::OwnedStream stream;
  Wait wait;
  set(wait, receives, kWhat, deadline_s);
  wait.began = Wait::Clock::now();
  send_and_receive(sends, receives, kWhat, deadline_s, stream.get());
  for (;;) {
    const ncclResult_t state = communicator_.state();
    if (cudaStreamQuery(stream.get()) != cudaErrorNotReady) break;
    if (const std::optional<Error> why = communicator_.why_over(wait, state)) {
      end(*why);
      throw Error(*why);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  cuda::check(cudaStreamSynchronize(stream.get()), "the first message between hosts");
  return std::chrono::duration<double>(Wait::Clock::now() - *wait.began).count();
}

void NcclLink::set(Wait& wait, std::span<const cuda::HostMessage> messages, const char* what,
                   double deadline_s) const {
  wait.what = what;
  wait.deadline_s = deadline_s;
  wait.ranks.clear();
  for (const cuda::HostMessage& message : messages) {
    wait.ranks.push_back(communicator_.members().ranks[message.host]);
  }
  wait.began.reset();
  wait.lost.reset();
}

NcclLink::Transfer NcclLink::take_transfer() {
  if (spare_.empty()) return {};
  Transfer transfer = std::move(spare_.back());
  spare_.pop_back();
  return transfer;
}

void NcclLink::exchange(std::span<const cuda::HostMessage> sends,
                        std::span<const cuda::HostMessage> receives, const char* what,
                        double deadline_s, cudaStream_t stream) {
  if (sends.empty() && receives.empty()) return;
  const std::lock_guard lock(mutex_);
  throw_if_over();
  Transfer transfer = take_transfer();
  set(transfer.wait, receives.empty() ? sends : receives, what, deadline_s);
  cuda::check(cudaEventRecord(transfer.may_begin.get(), stream), "cudaEventRecord");
  send_and_receive(sends, receives, what, deadline_s, stream);
  cuda::check(cudaEventRecord(transfer.is_over.get(), stream), "cudaEventRecord");
  pending_.push_back(std::move(transfer));
  if (pending_.size() == 1) wake_.notify_one();
}

void NcclLink::look() {
  // Before the events, because a peer may leave when all is done.
  const ncclResult_t state = communicator_.state();
  while (!pending_.empty() && cudaEventQuery(pending_.front().is_over.get()) == cudaSuccess) {
    spare_.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
  if (pending_.empty()) return;
  Transfer& transfer = pending_.front();
  const bool may_begin = cudaEventQuery(transfer.may_begin.get()) == cudaSuccess;
  if (may_begin && !transfer.wait.began) transfer.wait.began = Wait::Clock::now();
  if (const auto why = communicator_.why_over(transfer.wait, state)) end(*why);
}

void NcclLink::end(const Error& why) noexcept {
  if (failure_) return;
  failure_ = why;
  set_over();  // before the transfer's kernel ends: what follows it on the stream must see it
  communicator_.abort();
}

void NcclLink::watch() {
  cudaSetDevice(device_);
  // Looking at events must not spoil a capture of another thread.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock lock(mutex_);
  while (!is_ending_) {
    if (pending_.empty() || failure_) {
      wake_.wait(lock);
      continue;
    }
    look();
    if (!failure_ && !is_ending_) wake_.wait_for(lock, kBetweenLooks);
  }
}

std::optional<Error> NcclLink::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void NcclLink::fail(const Error& why) noexcept {
  const std::lock_guard lock(mutex_);
  end(why);
}

}  // namespace megamoe::nccl
