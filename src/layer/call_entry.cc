#include "layer/call_entry.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace megamoe {
namespace {

std::string text_of(const CallHeader& header) {
  const std::string call = header.kind == CallKind::forward
                               ? "forward"
                               : "backward of call " + std::to_string(header.forward_number);
  return call + " of layer " + std::to_string(header.layer_number);
}

}  // namespace

CallEntry::CallEntry(Communicator& group, std::size_t num_counts)
    : group_(group),
      counts_(num_counts),
      entry_(sizeof(CallHeader) + num_counts * sizeof(std::int32_t)),
      entries_R_(entry_.size() * group.size()) {}

void CallEntry::exchange(const CallHeader& mine, double deadline_s) {
  std::memcpy(entry_.data(), &mine, sizeof(mine));
  std::memcpy(entry_.data() + sizeof(mine), counts_.data(), counts_.size() * sizeof(counts_[0]));
  const char* what = mine.kind == CallKind::forward ? "the entry into MoeLayer::forward"
                                                    : "the entry into MoeLayer::backward";
  group_.all_gather(entry_.data(), entries_R_.data(), entry_.size(), what, deadline_s);
  check_headers();
}

CallHeader CallEntry::header_of(int rank) const {
  CallHeader header;
  std::memcpy(&header, entries_R_.data() + rank * entry_.size(), sizeof(header));
  return header;
}

void CallEntry::check_headers() const {
  for (int rank = 0; rank < group_.size(); ++rank) {
    throw_if_failed(header_of(rank).outcome, rank, group_.rank());
  }
  const CallHeader first = header_of(0);
  for (int rank = 1; rank < group_.size(); ++rank) {
    const CallHeader other = header_of(rank);
    const bool same_workspace = other.workspace_id == first.workspace_id;
    if (same_workspace && other.kind == first.kind && other.layer_number == first.layer_number &&
        other.forward_number == first.forward_number) {
      continue;
    }
    throw Error(ErrorCode::config_mismatch, "ranks make different calls: rank 0 " + text_of(first) +
                                                ", rank " + std::to_string(rank) + " " +
                                                text_of(other) +
                                                (same_workspace ? "" : " of another workspace"));
  }
}

void CallEntry::read_counts(int rank, std::size_t first, std::span<std::int32_t> out) const {
  const std::byte* counts = entries_R_.data() + rank * entry_.size() + sizeof(CallHeader);
  std::memcpy(out.data(), counts + first * sizeof(std::int32_t), out.size_bytes());
}

void throw_if_found(const IdFault& fault, const RoutingDims& dims) {
  if (!fault.found()) return;
  throw Error(ErrorCode::expert_id_out_of_range,
              "expert_ids[" + std::to_string(fault.token) + ", " + std::to_string(fault.slot) +
                  "] is " + std::to_string(fault.value) + ", must be -1 or from 0 to " +
                  std::to_string(dims.num_experts - 1));
}

void check_row_capacity(const WorkspaceDims& dims, const std::int32_t* counts_RE) {
  for (int rank = 0; rank < dims.routing.num_ranks; ++rank) {
    const std::int64_t need = rows_received(dims.routing, counts_RE, rank);
    if (need <= dims.row_capacity) continue;
    throw Error(ErrorCode::capacity_exceeded, "rank " + std::to_string(rank) + " would receive " +
                                                  std::to_string(need) + " rows; its capacity is " +
                                                  std::to_string(dims.row_capacity) +
                                                  " (LayerConfig::row_capacity)");
  }
}

}  // namespace megamoe
