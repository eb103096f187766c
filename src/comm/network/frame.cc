#include "comm/network/frame.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace megamoe::network {
namespace {

/// What a call of send or receive that moved nothing means.
Progress stopped(ssize_t count) {
  const bool again = count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  return again ? Progress::blocked : Progress::closed;
}

}  // namespace

std::uint64_t total_bytes(std::span<const RowSegment> segments) {
  std::uint64_t bytes = 0;
  for (const RowSegment& segment : segments) bytes += static_cast<std::uint64_t>(segment.bytes());
  return bytes;
}

PayloadCursor::Piece PayloadCursor::piece_at(std::size_t segment, std::int64_t row,
                                             std::int64_t offset) const {
  const RowSegment& rows = segments_[segment];
  if (rows.rows == nullptr) {
    return {rows.base + row * rows.row_bytes + offset,
            (rows.num_rows - row) * rows.row_bytes - offset, rows.num_rows - row};
  }
  return {rows.base + rows.rows[row] * rows.row_bytes + offset, rows.row_bytes - offset, 1};
}

int PayloadCursor::next(std::array<iovec, kMostPieces>& pieces) const {
  int count = 0;
  std::size_t segment = segment_;
  std::int64_t row = row_;
  std::int64_t offset = offset_;
  while (segment < segments_.size() && count < kMostPieces) {
    if (segments_[segment].bytes() > 0) {
      const Piece piece = piece_at(segment, row, offset);
      pieces[count++] = {piece.data, static_cast<std::size_t>(piece.bytes)};
      row += piece.num_rows;
      offset = 0;
    }
    if (segments_[segment].bytes() == 0 || row == segments_[segment].num_rows) {
      ++segment;
      row = 0;
    }
  }
  return count;
}

void PayloadCursor::advance(std::size_t bytes) {
  auto left = static_cast<std::int64_t>(bytes);
  while (left > 0) {
    const RowSegment& rows = segments_[segment_];
    const Piece piece = piece_at(segment_, row_, offset_);
    const std::int64_t step = std::min(left, piece.bytes);
    left -= step;
    offset_ += step;
    row_ += offset_ / rows.row_bytes;
    offset_ %= rows.row_bytes;
    settle();
  }
}

void PayloadCursor::settle() {
  while (segment_ < segments_.size() &&
         (segments_[segment_].bytes() == 0 || row_ == segments_[segment_].num_rows)) {
    ++segment_;
    row_ = 0;
  }
}

Progress FrameWriter::advance(int descriptor) {
  std::array<iovec, PayloadCursor::kMostPieces> pieces;
  for (;;) {
    msghdr message{};
    iovec header{};
    if (header_bytes_ < sizeof header_) {
      header = {reinterpret_cast<std::byte*>(&header_) + header_bytes_,
                sizeof header_ - header_bytes_};
      message.msg_iov = &header;
      message.msg_iovlen = 1;
    } else {
      message.msg_iov = pieces.data();
      message.msg_iovlen = static_cast<std::size_t>(payload_.next(pieces));
      if (message.msg_iovlen == 0) return Progress::done;
    }
    const ssize_t count = sendmsg(descriptor, &message, MSG_NOSIGNAL);
    if (count <= 0) return stopped(count);
    if (message.msg_iov == &header) {
      header_bytes_ += static_cast<std::size_t>(count);
    } else {
      payload_.advance(static_cast<std::size_t>(count));
    }
  }
}

Progress FrameReader::advance(int descriptor) {
  while (header_bytes_ < sizeof header_) {
    const ssize_t count = recv(descriptor, reinterpret_cast<std::byte*>(&header_) + header_bytes_,
                               sizeof header_ - header_bytes_, 0);
    if (count <= 0) return stopped(count);
    header_bytes_ += static_cast<std::size_t>(count);
  }
  if (!is_expected()) return drop(descriptor);
  std::array<iovec, PayloadCursor::kMostPieces> pieces;
  for (;;) {
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = static_cast<std::size_t>(payload_.next(pieces));
    if (message.msg_iovlen == 0) return Progress::done;
    const ssize_t count = recvmsg(descriptor, &message, 0);
    if (count <= 0) return stopped(count);
    payload_.advance(static_cast<std::size_t>(count));
  }
}

Progress FrameReader::drop(int descriptor) {
  std::array<std::byte, 16384> nowhere;
  while (dropped_bytes_ < header_.payload_bytes) {
    const std::uint64_t left = header_.payload_bytes - dropped_bytes_;
    const ssize_t count =
        recv(descriptor, nowhere.data(), std::min<std::uint64_t>(nowhere.size(), left), 0);
    if (count <= 0) return stopped(count);
    dropped_bytes_ += static_cast<std::uint64_t>(count);
  }
  return Progress::done;
}

}  // namespace megamoe::network
