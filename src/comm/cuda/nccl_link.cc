#include "comm/cuda/nccl_link.h"

#include <utility>

#include "comm/cuda/nccl_library.h"
#include "comm/peer_watch.h"
#include "cuda/runtime.h"

namespace megamoe::nccl {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{20};
/// Bytes that are sent to every host at the construction, so that NCCL connects and the link is
/// measured.
constexpr std::int64_t kGreetingBytes = std::int64_t{4} << 20;
/// What a peer had sent before it left, and what this rank still has to do first, may take its
/// time.
constexpr std::chrono::milliseconds kGrace{1000};
/// For peers to end the communicator, too.
constexpr double kGoodbyeS = 10.0;

}  // namespace

NcclLink::NcclLink(const ncclUniqueId& id, const Topology& topology, int rank, int max_ctas,
                   const std::uint32_t* has_left_R, double deadline_s)
    : topology_(topology), rank_(rank), max_ctas_(max_ctas), has_left_R_(has_left_R) {
  cuda::check(cudaGetDevice(&device_), "cudaGetDevice");
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // so that a peer that never comes is a deadline, not a hang
  config.maxCTAs = max_ctas;
  const Library& nccl = library();
  const ncclResult_t status =
      nccl.comm_init_rank_config(&comm_, topology.num_hosts(), id, topology.host_of(rank), &config);
  const std::lock_guard lock(mutex_);
  if (status != ncclSuccess && status != ncclInProgress) {
    check(status, "joining " + std::to_string(topology.num_hosts()) + " hosts");
  }
  settle("the hosts' NCCL group", deadline_s);
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
  if (comm_ != nullptr) {
    // What has been sent may still be on its way: finalizing waits for it.
    const Library& nccl = library();
    ncclResult_t state = nccl.comm_finalize(comm_);
    const Clock::time_point start = Clock::now();
    while (state == ncclInProgress &&
           Clock::now() - start < std::chrono::duration<double>(kGoodbyeS)) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      nccl.comm_get_async_error(comm_, &state);
    }
    state == ncclSuccess ? nccl.comm_destroy(comm_) : nccl.comm_abort(comm_);
  }
  for (auto& transfer : pending_) spare_.push_back(std::move(transfer));
  for (const Transfer& transfer : spare_) {
    cudaEventDestroy(transfer.may_begin);
    cudaEventDestroy(transfer.is_over);
  }
}

std::vector<int> NcclLink::other_hosts() const {
  std::vector<int> hosts;
  for (int host = 0; host < topology_.num_hosts(); ++host) {
    if (host != topology_.host_of(rank_)) hosts.push_back(host);
  }
  return hosts;
}

std::vector<int> NcclLink::left_among(const std::vector<int>& hosts) const {
  std::vector<int> left;
  for (const int host : hosts) {
    const int peer = topology_.rank_of(host, topology_.local_index_of(rank_));
    if (PeerWatch::has_left(has_left_R_, peer)) left.push_back(host);
  }
  return left;
}

std::string NcclLink::peers_on(const std::vector<int>& hosts) const {
  std::string text;
  for (const int host : hosts) {
    text += (text.empty() ? "" : ", ") +
            std::to_string(topology_.rank_of(host, topology_.local_index_of(rank_)));
  }
  return (hosts.size() == 1 ? "rank " : "ranks ") + text;
}

void NcclLink::throw_if_over() const {
  if (failure_) throw Error(*failure_);
}

void NcclLink::settle(const char* what, double deadline_s) {
  const Clock::time_point start = Clock::now();
  for (;;) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = library().comm_get_async_error(comm_, &state);
    if (asked != ncclSuccess) state = asked;
    if (state == ncclSuccess) return;
    const std::string who =
        "rank " + std::to_string(rank_) + " and " + peers_on(other_hosts()) + " by network: ";
    if (state != ncclInProgress) {
      const char* last = library().get_last_error(nullptr);
      end(Error(ErrorCode::peer_failed,
                who + what + ": NCCL: " + library().get_error_string(state) +
                    (last != nullptr ? std::string(" (") + last + ")" : "")));
    } else if (Clock::now() - start > std::chrono::duration<double>(deadline_s)) {
      end(Error(ErrorCode::deadline_exceeded,
                who + what + " could not be begun in " + std::to_string(deadline_s) + " s"));
    } else if (!watcher_.joinable()) {
      end_if_a_peer_left(what);
    }
    throw_if_over();
    std::this_thread::yield();
  }
}

void NcclLink::end_if_a_peer_left(const char* what) {
  const std::vector<int> left = left_among(other_hosts());
  if (left.empty()) return;
  if (!lost_peer_) lost_peer_ = Clock::now();
  if (Clock::now() - *lost_peer_ < kGrace) return;
  end(Error(ErrorCode::peer_failed, "rank " + std::to_string(rank_) + " waited for " + what +
                                        " of " + peers_on(left) + " by network, which left"));
}

void NcclLink::send_and_receive(std::span<const cuda::HostMessage> sends,
                                std::span<const cuda::HostMessage> receives, const char* what,
                                double deadline_s, cudaStream_t stream) {
  const Library& nccl = library();
  const auto begun = [&](ncclResult_t status) {
    if (status == ncclSuccess || status == ncclInProgress) return;
    const char* last = nccl.get_last_error(comm_);
    end(Error(ErrorCode::internal, std::string(what) + ": NCCL: " + nccl.get_error_string(status) +
                                       (last != nullptr ? std::string(" (") + last + ")" : "")));
    throw_if_over();
  };
  begun(nccl.group_start());
  ncclResult_t status = ncclSuccess;
  const auto add = [&](ncclResult_t result) {
    if (status == ncclSuccess || status == ncclInProgress) status = result;
  };
  for (const cuda::HostMessage& message : sends) {
    add(nccl.send(message.data, message.bytes, ncclInt8, message.host, comm_, stream));
  }
  for (const cuda::HostMessage& message : receives) {
    add(nccl.recv(message.data, message.bytes, ncclInt8, message.host, comm_, stream));
  }
  add(nccl.group_end());  // also after a failure: the thread must leave the group
  begun(status);
  settle(what, deadline_s);
}

/// The first message between two ranks allocates memory and loads code, which may wait for kernels
/// that run: it must not be one of a call.
void NcclLink::connect(double deadline_s) {
  const auto num_hosts = static_cast<std::int64_t>(other_hosts().size());
  const cuda::DeviceMemory memory(device_, 2 * num_hosts * kGreetingBytes, "greetings of hosts");
  greet(memory, 1, deadline_s);
  greet(memory, kGreetingBytes, deadline_s);
  const double seconds = greet(memory, kGreetingBytes, deadline_s);
  bytes_per_s_ = static_cast<double>(num_hosts * kGreetingBytes) / seconds;
}

double NcclLink::greet(const cuda::DeviceMemory& memory, std::int64_t bytes, double deadline_s) {
  const std::vector<int> hosts = other_hosts();
  const auto num_hosts = static_cast<std::int64_t>(hosts.size());
  std::vector<cuda::HostMessage> sends;
  std::vector<cuda::HostMessage> receives;
  for (const int host : hosts) {
    const auto place = static_cast<std::int64_t>(sends.size());
    sends.push_back({host, memory.data() + place * kGreetingBytes, bytes});
    receives.push_back({host, memory.data() + (num_hosts + place) * kGreetingBytes, bytes});
  }
  const cuda::OwnedStream stream;
  const Clock::time_point start = Clock::now();
  send_and_receive(sends, receives, "the first message", deadline_s, stream.get());
  while (cudaStreamQuery(stream.get()) == cudaErrorNotReady) {
    settle("the first message", deadline_s);
    if (Clock::now() - start > std::chrono::duration<double>(deadline_s)) {
      end(Error(ErrorCode::deadline_exceeded,
                "rank " + std::to_string(rank_) + " waited " + std::to_string(deadline_s) +
                    " s for the first message of " + peers_on(hosts) + " by network"));
    }
    end_if_a_peer_left("the first message");
    throw_if_over();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  cuda::check(cudaStreamSynchronize(stream.get()), "the first message between hosts");
  return std::chrono::duration<double>(Clock::now() - start).count();
}

NcclLink::Transfer NcclLink::take_transfer() {
  if (!spare_.empty()) {
    Transfer transfer = std::move(spare_.back());
    spare_.pop_back();
    transfer.hosts.clear();
    transfer.began.reset();
    transfer.lost_peer.reset();
    return transfer;
  }
  Transfer transfer;
  for (cudaEvent_t* event : {&transfer.may_begin, &transfer.is_over}) {
    cuda::check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
  }
  return transfer;
}

void NcclLink::exchange(std::span<const cuda::HostMessage> sends,
                        std::span<const cuda::HostMessage> receives, const char* what,
                        double deadline_s, cudaStream_t stream) {
  if (sends.empty() && receives.empty()) return;
  const std::lock_guard lock(mutex_);
  throw_if_over();
  Transfer transfer = take_transfer();
  transfer.what = what;
  transfer.deadline_s = deadline_s;
  const std::span<const cuda::HostMessage> awaited = receives.empty() ? sends : receives;
  for (const cuda::HostMessage& message : awaited) transfer.hosts.push_back(message.host);
  cuda::check(cudaEventRecord(transfer.may_begin, stream), "cudaEventRecord");
  send_and_receive(sends, receives, what, deadline_s, stream);
  cuda::check(cudaEventRecord(transfer.is_over, stream), "cudaEventRecord");
  pending_.push_back(std::move(transfer));
  if (pending_.size() == 1) wake_.notify_one();
}

void NcclLink::look() {
  // Before the events, because a peer may leave when all is done.
  ncclResult_t state = ncclSuccess;
  library().comm_get_async_error(comm_, &state);
  while (!pending_.empty() && cudaEventQuery(pending_.front().is_over) == cudaSuccess) {
    spare_.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
  if (pending_.empty()) return;
  if (state != ncclSuccess && state != ncclInProgress) {
    const std::vector<int> hosts = pending_.front().hosts;
    end(Error(ErrorCode::peer_failed, "rank " + std::to_string(rank_) + " waited for " +
                                          pending_.front().what + " of " + peers_on(hosts) +
                                          " by network, and lost the connection: NCCL: " +
                                          library().get_error_string(state)));
    return;
  }
  Transfer& transfer = pending_.front();
  if (cudaEventQuery(transfer.may_begin) != cudaSuccess) return;
  if (!transfer.began) transfer.began = Clock::now();
  if (const std::vector<int> left = left_among(transfer.hosts); !left.empty()) {
    if (!transfer.lost_peer) transfer.lost_peer = Clock::now();
    if (Clock::now() - *transfer.lost_peer > kGrace) {
      end(Error(ErrorCode::peer_failed, "rank " + std::to_string(rank_) + " waited for " +
                                            transfer.what + " of " + peers_on(left) +
                                            " by network, which left"));
      return;
    }
  }
  if (Clock::now() - *transfer.began < std::chrono::duration<double>(transfer.deadline_s)) return;
  end(Error(ErrorCode::deadline_exceeded, "rank " + std::to_string(rank_) + " waited " +
                                              std::to_string(transfer.deadline_s) + " s for " +
                                              transfer.what + " of " + peers_on(transfer.hosts) +
                                              " by network; the deadline has passed"));
}

void NcclLink::end(const Error& why) noexcept {
  if (failure_) return;
  failure_ = why;
  set_over();  // before the transfer's kernel ends: what follows it on the stream must see it
  if (comm_ != nullptr) library().comm_abort(std::exchange(comm_, nullptr));
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
