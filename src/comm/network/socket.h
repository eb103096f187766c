// TCP sockets: what a group on several hosts needs of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "comm/network/deadline.h"

namespace megamoe::network {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket();
  [[nodiscard]] int descriptor() const { return descriptor_; }
  [[nodiscard]] bool is_open() const { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

/// Where somebody listens. `address` is a name or a number; empty: every address of this machine.
struct Endpoint {
  std::string address;
  std::uint16_t port = 0;
};
std::string to_string(const Endpoint& endpoint);

/// "ADDRESS:PORT" or "[ADDRESS]:PORT". Throws invalid_argument naming `what`.
Endpoint parse_endpoint(const std::string& text, const char* what);

/// Throws invalid_argument where nothing resolves the address.
void require_resolvable(const Endpoint& endpoint);
/// Whether one of the addresses that the name has is one of this machine. Throws invalid_argument
/// where nothing resolves it.
bool is_of_this_machine(const Endpoint& endpoint);
/// Listens; port 0 takes a free one. Throws invalid_argument or internal with the system's reason.
Socket listen_on(const Endpoint& endpoint);
std::uint16_t port_of(const Socket& socket);

/// The numbers of both ends of a connection.
std::string own_address(const Socket& socket);
std::string peer_address(const Socket& socket);
bool is_loopback(const std::string& address);

/// Tries until somebody listens; empty after the deadline, with the last reason in `why`. Throws
/// invalid_argument where the address has no meaning.
std::optional<Socket> connect_to(const Endpoint& endpoint, const Deadline& deadline,
                                 std::string& why);
/// Waits until somebody is to be accepted, or one of `peers`, from which nothing else is to come,
/// has closed its connection, or the deadline has passed. The index of a peer that has closed, else
/// -1. Closed sockets of this side do not count.
int wait_beside(const Socket& listener, std::span<const Socket> peers, const Deadline& deadline);
/// Empty after the deadline.
std::optional<Socket> accept_from(const Socket& listener, const Deadline& deadline);

/// False where the other end closed, or the deadline passed, before all bytes had moved.
bool send_all(const Socket& socket, const void* data, std::size_t bytes, const Deadline& deadline);
bool receive_all(const Socket& socket, void* data, std::size_t bytes, const Deadline& deadline);

}  // namespace megamoe::network
