// Where ranks of this machine may meet.
#pragma once

#include <string>

#include "comm/network/socket.h"

namespace megamoe {

/// A loopback port that was free a moment ago.
inline std::string free_rendezvous() {
  const network::Socket socket = network::listen_on({"127.0.0.1", 0});
  return "127.0.0.1:" + std::to_string(network::port_of(socket));
}

}  // namespace megamoe
