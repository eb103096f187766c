// Messages between ranks that do not share memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace megamoe {

/// Rows of this rank's memory: row i is the `row_bytes` at base + rows[i] * row_bytes, or, where
/// `rows` is null, at base + i * row_bytes.
struct RowSegment {
  std::byte* base = nullptr;
  std::int64_t row_bytes = 0;
  std::int64_t num_rows = 0;
  const std::int32_t* rows = nullptr;

  [[nodiscard]] std::int64_t bytes() const { return num_rows * row_bytes; }
};

/// Its segments one after the other, to or from one peer.
struct Message {
  int peer = 0;
  std::span<const RowSegment> segments;
};

/// The part of a communicator that joins hosts.
class Network {
 public:
  Network() = default;
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;
  virtual ~Network() = default;

  /// Sends and receives all of it, at once; at most one message to and one from each peer. Peers
  /// do the same with equal sizes: config_mismatch otherwise. Throws as the members of Communicator
  /// do. `what` names the transfer.
  virtual void transfer(std::span<const Message> sends, std::span<const Message> receives,
                        const char* what, double deadline_s) = 0;
};

}  // namespace megamoe
