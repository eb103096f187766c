#include "comm/network/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "megamoe/error.h"

namespace megamoe::network {
namespace {

constexpr int kBacklog = 1024;
constexpr std::chrono::milliseconds kRetryInterval{20};

std::string system_reason() { return std::strerror(errno); }

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// Of the endpoint's address with `port`. Throws invalid_argument where nothing resolves it.
Addresses resolve(const Endpoint& endpoint, std::uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const char* address = endpoint.address.empty() ? nullptr : endpoint.address.c_str();
  const int status = getaddrinfo(address, std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    throw Error(ErrorCode::invalid_argument,
                "address " + to_string(endpoint) + " cannot be resolved: " + gai_strerror(status));
  }
  return {found, &freeaddrinfo};
}

Socket open_socket(const addrinfo& address) {
  return Socket(socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
                       address.ai_protocol));
}

/// Messages are whole when they are written: waiting for more would only delay them.
void send_at_once(const Socket& socket) {
  const int on = 1;
  setsockopt(socket.descriptor(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/// True once one of `events` (or an error) has come; false after the deadline.
bool wait_for(const Socket& socket, short events, const Deadline& deadline) {
  pollfd descriptor{socket.descriptor(), events, 0};
  for (;;) {
    const int count = poll(&descriptor, 1, deadline.remaining_ms());
    if (count > 0) return true;
    if (count == 0 && deadline.has_passed()) return false;
    if (count < 0 && errno != EINTR) return false;
  }
}

/// One attempt. Closed where it failed, with errno's reason in `why`.
Socket try_connect(const addrinfo& address, const Deadline& deadline, std::string& why) {
  Socket socket = open_socket(address);
  if (!socket.is_open()) {
    why = system_reason();
    return {};
  }
  int error = 0;
  if (connect(socket.descriptor(), address.ai_addr, address.ai_addrlen) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      if (!wait_for(socket, POLLOUT, deadline)) {
        why = "no answer";
        return {};
      }
      socklen_t size = sizeof error;
      getsockopt(socket.descriptor(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error != 0) {
    why = std::strerror(error);
    return {};
  }
  send_at_once(socket);
  return socket;
}

std::string address_text(const sockaddr_storage& address, socklen_t size) {
  std::array<char, NI_MAXHOST> text{};
  const int status = getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, text.data(),
                                 text.size(), nullptr, 0, NI_NUMERICHOST);
  return status == 0 ? text.data() : "";
}

}  // namespace

Socket::~Socket() {
  if (descriptor_ >= 0) close(descriptor_);
}

std::string to_string(const Endpoint& endpoint) {
  const bool has_colon = endpoint.address.find(':') != std::string::npos;
  return (has_colon ? "[" + endpoint.address + "]" : endpoint.address) + ":" +
         std::to_string(endpoint.port);
}

Endpoint parse_endpoint(const std::string& text, const char* what) {
  const std::size_t colon = text.rfind(':');
  const auto refuse = [&] {
    throw Error(ErrorCode::invalid_argument,
                std::string(what) + " must be ADDRESS:PORT, is \"" + text + "\"");
  };
  if (colon == std::string::npos || colon == 0) refuse();
  Endpoint endpoint{text.substr(0, colon), 0};
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data() + colon + 1, end, endpoint.port);
  if (error != std::errc() || rest != end || endpoint.port == 0) refuse();
  if (endpoint.address.front() == '[' && endpoint.address.back() == ']') {
    endpoint.address = endpoint.address.substr(1, endpoint.address.size() - 2);
  }
  if (endpoint.address.empty()) refuse();
  return endpoint;
}

void require_resolvable(const Endpoint& endpoint) { resolve(endpoint, endpoint.port, 0); }

bool is_of_this_machine(const Endpoint& endpoint) {
  const Addresses addresses = resolve(endpoint, /*port=*/0, 0);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const Socket socket = open_socket(*address);
    if (socket.is_open() && bind(socket.descriptor(), address->ai_addr, address->ai_addrlen) == 0) {
      return true;
    }
  }
  return false;
}

Socket listen_on(const Endpoint& endpoint) {
  const Addresses addresses = resolve(endpoint, endpoint.port, AI_PASSIVE);
  std::string why;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Socket socket = open_socket(*address);
    const int on = 1;
    if (socket.is_open() &&
        setsockopt(socket.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(socket.descriptor(), address->ai_addr, address->ai_addrlen) == 0 &&
        listen(socket.descriptor(), kBacklog) == 0) {
      return socket;
    }
    why = system_reason();
  }
  throw Error(ErrorCode::invalid_argument, "cannot listen on " + to_string(endpoint) + ": " + why);
}

std::uint16_t port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  getsockname(socket.descriptor(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string own_address(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  getsockname(socket.descriptor(), reinterpret_cast<sockaddr*>(&address), &size);
  return address_text(address, size);
}

std::string peer_address(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  getpeername(socket.descriptor(), reinterpret_cast<sockaddr*>(&address), &size);
  return address_text(address, size);
}

bool is_loopback(const std::string& address) {
  return address.rfind("127.", 0) == 0 || address == "::1" || address.rfind("::ffff:127.", 0) == 0;
}

std::optional<Socket> connect_to(const Endpoint& endpoint, const Deadline& deadline,
                                 std::string& why) {
  const Addresses addresses = resolve(endpoint, endpoint.port, 0);
  for (;;) {
    for (const addrinfo* address = addresses.get(); address != nullptr;
         address = address->ai_next) {
      Socket socket = try_connect(*address, deadline, why);
      if (socket.is_open()) return socket;
    }
    if (deadline.has_passed()) return std::nullopt;
    std::this_thread::sleep_for(kRetryInterval);
  }
}

int wait_beside(const Socket& listener, std::span<const Socket> peers, const Deadline& deadline) {
  // Only what is open: poll takes no more entries than a process may have files.
  std::vector<pollfd> polled{{listener.descriptor(), POLLIN, 0}};
  std::vector<int> peer_of{-1};
  for (std::size_t i = 0; i < peers.size(); ++i) {
    if (!peers[i].is_open()) continue;
    polled.push_back({peers[i].descriptor(), POLLRDHUP, 0});
    peer_of.push_back(static_cast<int>(i));
  }
  for (;;) {
    const int count = poll(polled.data(), polled.size(), deadline.remaining_ms());
    for (std::size_t i = 1; count > 0 && i < polled.size(); ++i) {
      if (polled[i].revents != 0) return peer_of[i];
    }
    if (count > 0 || deadline.has_passed() || (count < 0 && errno != EINTR)) return -1;
  }
}

std::optional<Socket> accept_from(const Socket& listener, const Deadline& deadline) {
  for (;;) {
    if (!wait_for(listener, POLLIN, deadline)) return std::nullopt;
    Socket socket(accept4(listener.descriptor(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.is_open()) {
      send_at_once(socket);
      return socket;
    }
    if (deadline.has_passed()) return std::nullopt;  // whoever knocked has gone
  }
}

bool send_all(const Socket& socket, const void* data, std::size_t bytes, const Deadline& deadline) {
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t count = send(socket.descriptor(), next, bytes, MSG_NOSIGNAL);
    if (count > 0) {
      next += count;
      bytes -= static_cast<std::size_t>(count);
    } else if (errno != EAGAIN && errno != EINTR) {
      return false;
    } else if (!wait_for(socket, POLLOUT, deadline)) {
      return false;
    }
  }
  return true;
}

bool receive_all(const Socket& socket, void* data, std::size_t bytes, const Deadline& deadline) {
  auto* next = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t count = recv(socket.descriptor(), next, bytes, 0);
    if (count > 0) {
      next += count;
      bytes -= static_cast<std::size_t>(count);
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
      return false;
    } else if (!wait_for(socket, POLLIN, deadline)) {
      return false;
    }
  }
  return true;
}

}  // namespace megamoe::network
