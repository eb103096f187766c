// How ranks enter a call where hosts agree about it: each tells all others which call it makes,
// what it found wrong, and its counts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/workspace_layout.h"
#include "layer/agreement.h"
#include "megamoe/communicator.h"

namespace megamoe {

enum class CallKind : std::int32_t { forward, backward };

/// Which call a rank makes; equal on all ranks, but for the outcome.
struct CallHeader {
  CallKind kind;
  std::uint64_t workspace_id;
  std::int64_t layer_number;
  std::int64_t forward_number;  ///< of a backward call: which forward call it belongs to
  LocalOutcome outcome;         ///< of what the rank did before it entered
};

class CallEntry {
 public:
  /// Ranks exchange `num_counts` numbers each. The communicator must outlive it.
  CallEntry(Communicator& group, std::size_t num_counts);

  /// This rank's, to be filled in before exchange().
  [[nodiscard]] std::span<std::int32_t> counts() { return counts_; }
  /// Also separates calls: a rank comes here only after it has read everything that its peers
  /// staged for the call before. Throws on every rank what one of them found wrong, config_mismatch
  /// where they make different calls, and what all_gather() throws.
  void exchange(const CallHeader& mine, double deadline_s);
  /// Copies count numbers of `rank`, from its number `first` on. After exchange().
  void read_counts(int rank, std::size_t first, std::span<std::int32_t> out) const;

 private:
  [[nodiscard]] CallHeader header_of(int rank) const;
  void check_headers() const;

  Communicator& group_;
  std::vector<std::int32_t> counts_;
  std::vector<std::byte> entry_;      ///< this rank's header and counts
  std::vector<std::byte> entries_R_;  ///< everybody's
};

/// Throws expert_id_out_of_range where there is a fault.
void throw_if_found(const IdFault& fault, const RoutingDims& dims);
/// Throws capacity_exceeded, the same on every rank, where a rank would receive more rows than it
/// has room for.
void check_row_capacity(const WorkspaceDims& dims, const std::int32_t* counts_RE);

}  // namespace megamoe
