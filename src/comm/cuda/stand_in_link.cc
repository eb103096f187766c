#include "comm/cuda/stand_in_link.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "base/longest_wait.h"
#include "comm/peer_watch.h"
#include "cuda/runtime.h"
#include "kernels/hosts/hosts.h"

namespace megamoe::cuda {
namespace {

/// By a kernel: copy engines take the copies of all streams of a process in one order, also those
/// that still wait, which here wait for each other.
void copy(const std::byte* from, std::byte* to, std::int64_t bytes, cudaStream_t stream) {
  constexpr std::int64_t kRowBytes = 4096;
  const std::int64_t num_rows = bytes / kRowBytes;
  const std::int64_t begin = num_rows * kRowBytes;
  gpu::copy_rows({from, nullptr, to, nullptr, kRowBytes, num_rows}, stream);
  const std::int64_t rest = bytes - begin;
  gpu::copy_rows({from + begin, nullptr, to + begin, nullptr, rest, rest > 0 ? 1 : 0}, stream);
}

void reach(int device) {
  int own = 0;
  check(cudaGetDevice(&own), "cudaGetDevice");
  if (own == device) return;
  const cudaError_t status = cudaDeviceEnablePeerAccess(device, 0);
  cudaGetLastError();
  if (status == cudaSuccess || status == cudaErrorPeerAccessAlreadyEnabled) return;
  throw Error(ErrorCode::unsupported, "device " + std::to_string(own) +
                                          " cannot load from device " + std::to_string(device) +
                                          ", as stand-in hosts of one process must");
}

}  // namespace

StandInLink::StandInLink(std::shared_ptr<StandInNetwork> network, const Topology& topology,
                         int rank, std::span<const int> devices_R, const std::uint32_t* has_left_R)
    : network_(std::move(network)),
      topology_(topology),
      rank_(rank),
      own_host_(topology.host_of(rank)),
      has_left_R_(has_left_R),
      events_S_(topology.num_hosts()) {
  for (int host = 0; host < topology.num_hosts(); ++host) {
    reach(devices_R[topology.rank_of(host, topology.local_index_of(rank))]);
  }
}

template <class Condition>
void StandInLink::await(std::unique_lock<std::mutex>& lock, int host, const char* what,
                        double deadline_s, Condition holds) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kBetweenLooks{20};
  const std::chrono::duration<double> limit(std::min(deadline_s, kLongestWaitS));
  const Clock::time_point start = Clock::now();
  const int peer = topology_.rank_of(host, topology_.local_index_of(rank_));
  const std::string who = "rank " + std::to_string(rank_) + " waited ";
  const std::string for_what = std::string("for ") + what + " of rank " + std::to_string(peer);
  bool has_left = false;
  while (!network_->failure_ && !holds()) {
    if (has_left) {
      network_->failure_ = Error(ErrorCode::peer_failed, who + for_what + ", which left");
    } else if (Clock::now() - start > limit) {
      network_->failure_ =
          Error(ErrorCode::deadline_exceeded, who + std::to_string(deadline_s) + " s " + for_what);
    }
    if (network_->failure_) {
      network_->news_.notify_all();
      break;
    }
    // It may have come here before it left: then that is news by now.
    has_left = PeerWatch::has_left(has_left_R_, peer);
    if (!has_left) network_->news_.wait_for(lock, kBetweenLooks);
  }
  if (network_->failure_) end(*network_->failure_);
}

void StandInLink::end(const Error& why) {
  set_over();
  throw Error(why);
}

void StandInLink::exchange(std::span<const HostMessage> sends,
                           std::span<const HostMessage> receives, const char* what,
                           double deadline_s, cudaStream_t stream) {
  std::unique_lock lock(network_->mutex_);
  if (network_->failure_) end(*network_->failure_);
  for (const HostMessage& message : sends) {
    Events& events = events_S_[message.host];
    cudaEvent_t event = events.is_written[events.num_sent++ % 2].get();
    check(cudaEventRecord(event, stream), "cudaEventRecord");
    box(own_host_, message.host).letters.push_back({message.data, message.bytes, event});
  }
  network_->news_.notify_all();
  for (const HostMessage& message : receives) {
    StandInNetwork::Box& from = box(message.host, own_host_);
    await(lock, message.host, what, deadline_s, [&] { return !from.letters.empty(); });
    const StandInNetwork::Letter letter = from.letters.front();
    from.letters.pop_front();
    if (letter.bytes != message.bytes) {
      network_->failure_ = Error(ErrorCode::internal,
                                 std::string(what) + ": " + std::to_string(letter.bytes) +
                                     " bytes came, " + std::to_string(message.bytes) + " awaited");
      network_->news_.notify_all();
      end(*network_->failure_);
    }
    Events& events = events_S_[message.host];
    cudaEvent_t event = events.is_copied[events.num_received++ % 2].get();
    check(cudaStreamWaitEvent(stream, letter.is_written, 0), "cudaStreamWaitEvent");
    copy(letter.data, message.data, message.bytes, stream);
    check(cudaEventRecord(event, stream), "cudaEventRecord");
    from.copies.push_back(event);
  }
  network_->news_.notify_all();
  for (const HostMessage& message : sends) {
    StandInNetwork::Box& to = box(own_host_, message.host);
    await(lock, message.host, what, deadline_s, [&] { return !to.copies.empty(); });
    check(cudaStreamWaitEvent(stream, to.copies.front(), 0), "cudaStreamWaitEvent");
    to.copies.pop_front();
  }
}

std::optional<Error> StandInLink::failure() {
  const std::lock_guard lock(network_->mutex_);
  return network_->failure_;
}

void StandInLink::fail(const Error& why) noexcept {
  const std::lock_guard lock(network_->mutex_);
  set_over();
  if (network_->failure_) return;
  network_->failure_ = why;
  network_->news_.notify_all();
}

}  // namespace megamoe::cuda
