// A message as it lies in a stream: a header that says what it is for, then its bytes. Writer and
// reader go on where they were, as far as the socket lets them.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/meeting.h"
#include "comm/network/network.h"

namespace megamoe::network {

struct FrameHeader {
  std::uint64_t payload_bytes = 0;
  MeetingPurpose purpose;
};

enum class Progress { done, blocked, closed };

std::uint64_t total_bytes(std::span<const RowSegment> segments);

/// A place in segments.
class PayloadCursor {
 public:
  explicit PayloadCursor(std::span<const RowSegment> segments) : segments_(segments) { settle(); }

  static constexpr int kMostPieces = 64;
  /// Fills `pieces` with the next memory; returns how many, 0 at the end.
  int next(std::array<iovec, kMostPieces>& pieces) const;
  void advance(std::size_t bytes);

 private:
  /// From `row` on, the bytes that lie together and their address.
  struct Piece {
    std::byte* data;
    std::int64_t bytes;
    std::int64_t num_rows;
  };
  [[nodiscard]] Piece piece_at(std::size_t segment, std::int64_t row, std::int64_t offset) const;
  /// Steps over segments that have nothing left.
  void settle();

  std::span<const RowSegment> segments_;
  std::size_t segment_ = 0;
  std::int64_t row_ = 0;
  std::int64_t offset_ = 0;  ///< in the row
};

class FrameWriter {
 public:
  FrameWriter(const MeetingPurpose& purpose, std::span<const RowSegment> payload)
      : header_{total_bytes(payload), purpose}, payload_(payload) {}
  Progress advance(int descriptor);

 private:
  FrameHeader header_;
  std::size_t header_bytes_ = 0;
  PayloadCursor payload_;
};

/// Reads the payload only where the frame has the purpose that is expected; else it is dropped, so
/// that the next frame can be read.
class FrameReader {
 public:
  FrameReader(const MeetingPurpose& expected, std::span<const RowSegment> payload)
      : expected_(expected), expected_bytes_(total_bytes(payload)), payload_(payload) {}
  Progress advance(int descriptor);
  /// Of the frame that came. Valid when done.
  [[nodiscard]] const MeetingPurpose& purpose() const { return header_.purpose; }

 private:
  [[nodiscard]] bool is_expected() const {
    return header_.purpose == expected_ && header_.payload_bytes == expected_bytes_;
  }
  Progress drop(int descriptor);

  MeetingPurpose expected_;
  std::uint64_t expected_bytes_;
  FrameHeader header_;
  std::size_t header_bytes_ = 0;
  PayloadCursor payload_;
  std::uint64_t dropped_bytes_ = 0;
};

}  // namespace megamoe::network
