// How a rank's own error becomes everybody's: it is carried as plain data, exchanged, and thrown on
// all ranks.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "megamoe/communicator.h"
#include "megamoe/error.h"

namespace megamoe {

/// The outcome of the part of a call that a rank does alone.
struct LocalOutcome {
  std::int32_t failed = 0;
  ErrorCode code = ErrorCode::internal;
  std::array<char, 504> message{};  ///< cut if longer
};

/// Runs `work` and keeps what it throws.
template <class Work>
LocalOutcome outcome_of(Work&& work) {
  LocalOutcome outcome;
  const auto keep = [&](ErrorCode code, const char* message) {
    outcome.failed = 1;
    outcome.code = code;
    std::strncpy(outcome.message.data(), message, outcome.message.size() - 1);
  };
  try {
    work();
  } catch (const Error& error) {
    keep(error.code(), error.what());
  } catch (const std::bad_alloc&) {
    keep(ErrorCode::out_of_memory, "host memory is exhausted");
  } catch (const std::exception& error) {
    keep(ErrorCode::internal, error.what());
  }
  return outcome;
}

/// Throws the outcome of `rank`; on other ranks the message says whose it is.
inline void throw_if_failed(const LocalOutcome& outcome, int rank, int this_rank) {
  if (outcome.failed == 0) return;
  const std::string prefix =
      rank == this_rank ? std::string() : "rank " + std::to_string(rank) + ": ";
  throw Error(outcome.code, prefix + outcome.message.data());
}

/// Throws on every rank what one of them met.
inline void agree(Communicator& group, const LocalOutcome& mine, const char* what,
                  double deadline_s) {
  std::vector<LocalOutcome> outcomes(group.size());
  group.all_gather(&mine, outcomes.data(), sizeof(mine), what, deadline_s);
  for (int rank = 0; rank < group.size(); ++rank) {
    throw_if_failed(outcomes[rank], rank, group.rank());
  }
}

/// The same for work in which peers may be waiting for this rank, by other means than the group:
/// where it fails here, they do not come to agree. It leaves the group, which tells them.
inline void agree_or_leave(Communicator& group, const LocalOutcome& mine, const char* what,
                           double deadline_s) {
  if (mine.failed != 0) {
    std::string message = mine.message.data();
    if (mine.code == ErrorCode::peer_failed) {
      // Of the first: others left because of it.
      const std::vector<Departure> departures = group.departures();
      if (!departures.empty()) message += std::string(": ") + departures.front().error.what();
    }
    group.abort(message);
    throw Error(mine.code, message);
  }
  agree(group, mine, what, deadline_s);
}

}  // namespace megamoe
