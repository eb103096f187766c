#include "comm/network/mesh.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

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
      departures_R_(links_.size()) {
  polled_.reserve(links_.size());
  polled_peers_.reserve(links_.size());
}

Mesh::~Mesh() { leave("its communicator was destroyed"); }

void Mesh::throw_if_failed() const {
  if (failure_) throw Error(*failure_);
}

void Mesh::exchange(std::span<const Outgoing> outgoing, std::span<Incoming> incoming,
                    const char* what, double deadline_s) {
  throw_if_failed();
  const Deadline deadline(deadline_s);
  look_for_departures();
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
  const auto fail_here = [&] {
    fail_because_of(peer, " while rank " + std::to_string(rank_) + " waited for " + what);
  };
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
  send_departure(DepartureKind::broken, reason);
  fail(ErrorCode::deadline_exceeded, reason);
}

/// Messages are cut off where they are: nothing can follow on these connections.
void Mesh::fail(ErrorCode code, const std::string& reason) {
  for (Traffic& traffic : traffic_R_) traffic = {};
  failure_ = Error(code, reason);
  throw Error(*failure_);
}

void Mesh::fail_because_of(int peer, const std::string& while_what) {
  const Departure& departure = departure_of(peer, kReasonWaitS);
  const std::string reason = departure.reason.data();
  if (departure.kind == DepartureKind::broken) {
    send_departure(DepartureKind::broken, reason);  // for those that wait for this rank only
    fail(ErrorCode::deadline_exceeded, reason);
  }
  fail(ErrorCode::peer_failed,
       "rank " + std::to_string(peer) + " has left (" + reason + ")" + while_what);
}

const Mesh::Departure& Mesh::departure_of(int peer, double wait_s) {
  Departure& departure = departures_R_[peer];
  if (departure.kind != DepartureKind::none) return departure;
  if (!receive_all(links_[peer].departure, &departure, sizeof departure, Deadline(wait_s))) {
    departure = {DepartureKind::left, {}};
    std::strncpy(departure.reason.data(),
                 "its process, or the connection to it, has ended without a word",
                 departure.reason.size() - 1);
  }
  departure.reason.back() = '\0';
  return departure;
}

void Mesh::look_for_departures() {
  polled_.clear();
  polled_peers_.clear();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_ || departures_R_[peer].kind != DepartureKind::none) continue;
    polled_.push_back({links_[peer].departure.descriptor(), POLLIN, 0});
    polled_peers_.push_back(peer);
  }
  poll(polled_.data(), polled_.size(), 0);
  for (std::size_t i = 0; i < polled_.size(); ++i) {
    if (polled_[i].revents == 0) continue;
    if (departure_of(polled_peers_[i], kReasonWaitS).kind == DepartureKind::broken) {
      fail_because_of(polled_peers_[i], "");
    }
  }
}

void Mesh::throw_if_peer_left() {
  throw_if_failed();
  look_for_departures();
  for (int peer = 0; peer < size(); ++peer) {
    if (departures_R_[peer].kind != DepartureKind::none) fail_because_of(peer, "");
  }
}

void Mesh::send_departure(DepartureKind kind, const std::string& reason) noexcept {
  if (std::exchange(has_left_, true)) return;
  Departure departure{kind, {}};
  std::strncpy(departure.reason.data(), reason.c_str(), departure.reason.size() - 1);
  for (const Link& link : links_) {
    if (!link.data.is_open()) continue;
    // Small, and the first on its connection: the system takes it whole.
    send(link.departure.descriptor(), &departure, sizeof departure, MSG_NOSIGNAL | MSG_DONTWAIT);
    shutdown(link.data.descriptor(), SHUT_WR);
  }
}

void Mesh::leave(const std::string& reason) noexcept {
  send_departure(DepartureKind::left, failure_ ? failure_->what() : reason);
}

}  // namespace megamoe::network
