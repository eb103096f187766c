// A checksum that notices accidents: cut, flipped or swapped bytes. Not a defence against forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace megamoe::trainer {

inline constexpr std::uint64_t kEmptyChecksum = 0xcbf29ce484222325U;

/// FNV-1a, 64 bits. Pass the checksum of what came before to continue it.
constexpr std::uint64_t checksum(std::span<const std::byte> bytes,
                                 std::uint64_t before = kEmptyChecksum) {
  for (const std::byte byte : bytes) {
    before = (before ^ static_cast<std::uint64_t>(byte)) * 0x100000001b3U;
  }
  return before;
}

}  // namespace megamoe::trainer
