// Turns the bytes of a fuzzer into numbers. Past the end everything is 0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace megamoe::fuzz {

class ByteReader {
 public:
  ByteReader(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::uint8_t byte() {
    if (position_ >= size_) return 0;
    return data_[position_++];
  }
  /// A number in [low, high], from one byte.
  std::int64_t in_range(std::int64_t low, std::int64_t high) {
    return low + byte() % (high - low + 1);
  }
  std::int64_t int64() {
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return static_cast<std::int64_t>(value);
  }
  /// Mostly `usual`; sometimes a neighbour, sometimes anything.
  std::int64_t near(std::int64_t usual) {
    const std::uint8_t choice = byte();
    if (choice < 232) return usual;
    switch (choice % 8) {
      case 0:
        return usual + 1;
      case 1:
        return usual - 1;
      case 2:
        return -usual;
      case 3:
        return 0;
      case 4:
        return usual * 2;
      default:
        return int64();
    }
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t position_ = 0;
};

}  // namespace megamoe::fuzz
