// What a rank came to a meeting for. Ranks that came for different things must not read each
// other's memory: they compare first, and all of them learn who was where.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "megamoe/error.h"

namespace megamoe {

/// Trivially copyable, so that it can lie in memory that processes share.
struct MeetingPurpose {
  enum class Kind : std::uint32_t { barrier, all_gather, all_reduce, allocation, transfer };

  Kind kind = Kind::barrier;
  std::uint64_t bytes = 0;  ///< of the whole collective, equal on all ranks
  std::array<char, 112> what{};

  bool operator==(const MeetingPurpose&) const = default;
};

inline MeetingPurpose meeting_purpose(MeetingPurpose::Kind kind, std::uint64_t bytes,
                                      const char* what) {
  MeetingPurpose purpose;
  purpose.kind = kind;
  purpose.bytes = bytes;
  std::strncpy(purpose.what.data(), what, purpose.what.size() - 1);
  return purpose;
}

inline std::string to_string(const MeetingPurpose& purpose) {
  const std::string what = purpose.what.data();
  const std::string size = " of " + std::to_string(purpose.bytes) + " bytes";
  switch (purpose.kind) {
    case MeetingPurpose::Kind::all_gather:
      return what + " (a gather" + size + ")";
    case MeetingPurpose::Kind::all_reduce:
      return what + " (a sum" + size + ")";
    case MeetingPurpose::Kind::allocation:
      return what + size;
    case MeetingPurpose::Kind::transfer:
      return what + " (a transfer" + size + ")";
    case MeetingPurpose::Kind::barrier:
      break;
  }
  return what + " (a barrier)";
}

/// Throws config_mismatch, the same on every rank, unless all of purpose_of(0 ... num_ranks - 1)
/// are equal. The meeting is over by then: the group stays usable.
template <class PurposeOf>
void throw_if_purposes_differ(int num_ranks, const PurposeOf& purpose_of) {
  const MeetingPurpose& first = purpose_of(0);
  for (int rank = 1; rank < num_ranks; ++rank) {
    const MeetingPurpose& other = purpose_of(rank);
    if (other == first) continue;
    throw Error(ErrorCode::config_mismatch, "ranks make different calls: rank 0 is at " +
                                                to_string(first) + ", rank " +
                                                std::to_string(rank) + " at " + to_string(other));
  }
}

}  // namespace megamoe
