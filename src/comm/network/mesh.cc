#include "comm/network/mesh.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/departure.h"

namespace megamoe::network {
namespace {

/// A connection that has ended says so at once; what the peer said about it comes on another one.
constexpr double kReasonWaitS = 2.0;

}  // namespace

Mesh::Mesh(std::vector<Link> links, int rank)
    : links_(std::move(links)),
      rank_(rank),
      traffic_R_(links_.size()),
      events_R_(links_.size(), 0),
      process_(getpid()),
      leaves_R_(links_.size()) {
  for (std::vector<pollfd>* polled : {&polled_, &asked_}) polled->reserve(links_.size());
  for (std::vector<int>* peers : {&polled_peers_, &asked_peers_, &left_}) {
    peers->reserve(links_.size());
  }
}

Mesh::~Mesh() { leave("its communicator was destroyed"); }

void Mesh::throw_if_failed() const {
  if (failure_) throw Error(*failure_);
}

void Mesh::exchange(std::span<const Outgoing> outgoing, std::span<Incoming> incoming,
                    const char* what, double deadline_s) {
  throw_if_failed();
  const Deadline deadline(deadline_s);
  throw_if_broken();
  for (const Outgoing& message : outgoing) {
    traffic_R_[message.peer].writer.emplace(message.purpose, message.payload);
  }
  for (Incoming& message : incoming) {
    traffic_R_[message.peer].reader.emplace(message.purpose, message.payload);
    traffic_R_[message.peer].incoming = &message;
  }
  std::fill(events_R_.begin(), events_R_.end(), static_cast<short>(POLLIN | POLLOUT));
  for (;;) {
    bool is_over = true;
    for (int peer = 0; peer < size(); ++peer) {
      if (!traffic_R_[peer].is_over() && events_R_[peer] != 0) advance(peer, what);
      is_over = is_over && traffic_R_[peer].is_over();
    }
    if (is_over) return;
    wait(deadline, what);
  }
}

/// Reads first: a peer that has left may have sent all that is awaited.
void Mesh::advance(int peer, const char* what) {
  Traffic& traffic = traffic_R_[peer];
  const int descriptor = links_[peer].data.descriptor();
  const auto fail_here = [&] { fail_because_of(peer, while_waiting_for(what)); };
  if (traffic.reader) {
    const Progress progress = traffic.reader->advance(descriptor);
    if (progress == Progress::closed) fail_here();
    if (progress == Progress::done) {
      traffic.incoming->purpose = traffic.reader->purpose();
      traffic.reader.reset();
    }
  }
  if (traffic.writer) {
    const Progress progress = traffic.writer->advance(descriptor);
    if (progress == Progress::closed) fail_here();
    if (progress == Progress::done) {
      traffic.writer.reset();
    } else if (!traffic.reader && (events_R_[peer] & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
      fail_here();  // it reads no more
    }
  }
}

std::string Mesh::while_waiting_for(const char* what) const {
  return " while rank " + std::to_string(rank_) + " waited for " + what;
}

void Mesh::wait(const Deadline& deadline, const char* what) {
  polled_.clear();
  polled_peers_.clear();
  for (int peer = 0; peer < size(); ++peer) {
    events_R_[peer] = 0;
    const Traffic& traffic = traffic_R_[peer];
    if (traffic.is_over()) continue;
    const int events = (traffic.reader ? POLLIN : 0) | (traffic.writer ? POLLOUT | POLLRDHUP : 0);
    polled_.push_back({links_[peer].data.descriptor(), static_cast<short>(events), 0});
    polled_peers_.push_back(peer);
  }
  const int count = poll(polled_.data(), polled_.size(), deadline.remaining_ms());
  if (count == 0 && deadline.has_passed()) miss_deadline(deadline, what);
  if (count <= 0) return;  // interrupted
  for (std::size_t i = 0; i < polled_.size(); ++i) {
    events_R_[polled_peers_[i]] = polled_[i].revents;
  }
}

void Mesh::miss_deadline(const Deadline& deadline, const char* what) {
  std::string missing;
  for (int peer = 0; peer < size(); ++peer) {
    if (!traffic_R_[peer].is_over())
      missing += (missing.empty() ? "" : ", ") + std::to_string(peer);
  }
  const std::string reason = "rank " + std::to_string(rank_) + " waited " +
                             std::to_string(deadline.seconds()) + " s for " + what +
                             "; missing: rank " + missing;
  send_leave(LeaveKind::broken, reason);
  fail(ErrorCode::deadline_exceeded, reason);
}

/// Messages are cut off where they are: nothing can follow on these connections.
void Mesh::fail(ErrorCode code, const std::string& reason) {
  for (Traffic& traffic : traffic_R_) traffic = {};
  const Error error(code, reason);
  {
    const std::lock_guard lock(leaves_mutex_);
    failure_ = error;
  }
  throw Error(error);
}

void Mesh::fail_because_of(int peer, const std::string& while_what) {
  Leave leave;
  {
    const std::lock_guard lock(leaves_mutex_);
    leave = leave_of(peer, kReasonWaitS);
  }
  const std::string reason = leave.reason.data();
  if (leave.kind == LeaveKind::broken) {
    send_leave(LeaveKind::broken, reason);  // for those that wait for this rank only
    fail(ErrorCode::deadline_exceeded, reason);
  }
  fail(ErrorCode::peer_failed, first_cause_text(peer, reason) + while_what);
}

const Mesh::Leave& Mesh::leave_of(int peer, double wait_s) {
  Leave& leave = leaves_R_[peer];
  if (leave.kind != LeaveKind::none) return leave;
  if (!receive_all(links_[peer].departure, &leave, sizeof leave, Deadline(wait_s))) {
    leave = {LeaveKind::left, {}};
    std::strncpy(leave.reason.data(),
                 "its process, or the connection to it, has ended without a word",
                 leave.reason.size() - 1);
  }
  leave.reason.back() = '\0';
  left_.push_back(peer);
  return leave;
}

int Mesh::look_for_leaves() {
  asked_.clear();
  asked_peers_.clear();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_ || leaves_R_[peer].kind != LeaveKind::none) continue;
    asked_.push_back({links_[peer].departure.descriptor(), POLLIN, 0});
    asked_peers_.push_back(peer);
  }
  poll(asked_.data(), asked_.size(), 0);
  for (std::size_t i = 0; i < asked_.size(); ++i) {
    if (asked_[i].revents != 0) leave_of(asked_peers_[i], kReasonWaitS);
  }
  const auto breaker = std::ranges::find_if(
      left_, [&](int peer) { return leaves_R_[peer].kind == LeaveKind::broken; });
  return breaker == left_.end() ? -1 : *breaker;
}

void Mesh::throw_if_broken() {
  int breaker = -1;
  {
    const std::lock_guard lock(leaves_mutex_);
    breaker = look_for_leaves();
  }
  if (breaker >= 0) fail_because_of(breaker, "");
}

void Mesh::throw_if_left(const char* what) {
  throw_if_failed();
  int first = -1;
  {
    const std::lock_guard lock(leaves_mutex_);
    const int breaker = look_for_leaves();
    if (!left_.empty()) first = breaker >= 0 ? breaker : left_.front();
  }
  if (first >= 0) fail_because_of(first, while_waiting_for(what));
}

std::vector<Departure> Mesh::departures() {
  const std::lock_guard lock(leaves_mutex_);
  const int breaker = look_for_leaves();
  std::optional<Error> broken;
  if (breaker >= 0) broken = Error(ErrorCode::deadline_exceeded, leaves_R_[breaker].reason.data());
  if (failure_ && failure_->code() == ErrorCode::deadline_exceeded) broken = failure_;
  std::vector<Departure> departures;
  const auto add = [&](int peer) {
    departures.push_back(
        {peer, broken ? *broken
                      : Error(ErrorCode::peer_failed,
                              first_cause_text(peer, leaves_R_[peer].reason.data()))});
  };
  for (const int peer : left_) add(peer);
  for (int peer = 0; broken && peer < size(); ++peer) {
    if (peer != rank_ && leaves_R_[peer].kind == LeaveKind::none) add(peer);
  }
  return departures;
}

void Mesh::send_leave(LeaveKind kind, const std::string& reason) noexcept {
  if (process_ != getpid()) return;  // a forked child's copy: the rank is still here
  if (std::exchange(has_left_, true)) return;
  Leave leave{kind, {}};
  std::strncpy(leave.reason.data(), reason.c_str(), leave.reason.size() - 1);
  for (const Link& link : links_) {
    if (!link.data.is_open()) continue;
    // Small, and the first on its connection: the system takes it whole.
    send(link.departure.descriptor(), &leave, sizeof leave, MSG_NOSIGNAL | MSG_DONTWAIT);
    shutdown(link.data.descriptor(), SHUT_WR);
  }
}

void Mesh::leave(const std::string& reason) noexcept {
  send_leave(LeaveKind::left, failure_ ? failure_->what() : reason);
}

}  // namespace megamoe::network
