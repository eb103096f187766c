#include "kernels/failure.h"

#include <string>

namespace megamoe::gpu {
namespace {

using device::FailureCode;
using device::FailureRecord;
using device::Signal;

const char* describe(Signal awaited) {
  switch (awaited) {
    case Signal::entered:
      return "the entry into the call";
    case Signal::rows_staged:
      return "staged rows";
    case Signal::gradients_sent:
      return "activation gradients";
    case Signal::results_sent:
      return "expert outputs";
  }
  return "?";
}

std::string rank_text(std::int32_t rank) { return "rank " + std::to_string(rank); }

std::string wait_text(const FailureRecord& record) {
  return rank_text(record.rank) + " waited for " + describe(record.awaited) + " of " +
         rank_text(record.peer) + " in call " + std::to_string(record.expected) +
         " (last seen in call " + std::to_string(record.seen) + ")";
}

}  // namespace

Error to_error(const FailureRecord& record) {
  switch (record.code) {
    case FailureCode::expert_id_out_of_range:
      return {ErrorCode::expert_id_out_of_range,
              rank_text(record.peer) + ": expert_ids[" + std::to_string(record.token) + ", " +
                  std::to_string(record.slot) + "] is " + std::to_string(record.value) +
                  ", must be -1 or from 0 to " + std::to_string(record.need - 1)};
    case FailureCode::capacity_exceeded:
      return {ErrorCode::capacity_exceeded,
              rank_text(record.peer) + " would receive " + std::to_string(record.need) +
                  " rows; its capacity is " + std::to_string(record.capacity) +
                  " (LayerConfig::row_capacity)"};
    case FailureCode::forward_failed:
      return {ErrorCode::invalid_argument,
              "the forward call that this backward call belongs to failed on " +
                  rank_text(record.peer)};
    case FailureCode::calls_differ:
      return {ErrorCode::config_mismatch,
              "ranks make different calls: " + rank_text(record.peer) + " and rank 0"};
    case FailureCode::call_refused:
      return {static_cast<ErrorCode>(record.value),
              rank_text(record.peer) + " refused the call; its own error says why"};
    case FailureCode::deadline_exceeded:
      return {ErrorCode::deadline_exceeded, wait_text(record) + "; the deadline has passed"};
    case FailureCode::peer_failed:
      return {ErrorCode::peer_failed, wait_text(record) + "; the peer has failed"};
    case FailureCode::rows_late:
      return {ErrorCode::deadline_exceeded,
              rank_text(record.rank) + " waited for the rows from row " +
                  std::to_string(record.value) + " on: " + std::to_string(record.seen) + " of " +
                  std::to_string(record.expected) + " were in place; the deadline has passed"};
    case FailureCode::none:
      break;
  }
  return {ErrorCode::internal, "failure record without a failure"};
}

}  // namespace megamoe::gpu
