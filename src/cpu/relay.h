// What a call does between hosts: each rank sends its tokens to the rank with its own index on
// every other host, which stands for it there (its relay) and sends the results back.
//
// Legend: R ranks, S hosts, T tokens, K slots, H hidden, m tokens that cross.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/network/network.h"
#include "cpu/reference.h"
#include "megamoe/communicator.h"
#include "routing/crossing.h"

namespace megamoe::cpu {

class Relay {
 public:
  /// `local` is the workspace's local memory; `group` outlives the relay.
  Relay(const WorkspaceDims& dims, Communicator& group, std::byte* local);

  /// S, and what a forward call needs to know of its tokens: how many cross to each host.
  [[nodiscard]] int num_hosts() const { return topology_.num_hosts(); }
  void count_tokens(std::span<const std::int32_t> ids_TK, std::int32_t* counts_S) const;

  /// Moves ids and staged x rows to the relays, which publish pull lists for their hosts. Nothing
  /// on one host, as all that follows.
  void send_forward(const StageContext& stage, const CpuCallState& state, PlanScratch& scratch,
                    double deadline_s);
  /// The same with dy rows and weights.
  void send_backward(const StageContext& stage, const CpuCallState& state, PlanScratch& scratch,
                     double deadline_s);
  /// Moves o rows from the relays' slots to those of the sources.
  void return_forward(const StageContext& stage, double deadline_s);
  /// dx rows and dw.
  void return_backward(const StageContext& stage, double deadline_s);

 private:
  /// A host other than this one, and the rank there that this one exchanges with.
  struct Peer {
    int host = 0;
    int rank = 0;
    std::int32_t* sent_tokens_T = nullptr;
    std::int32_t* own_slots_TK = nullptr;
    std::int32_t* relayed_ids_TK = nullptr;
    std::int32_t* relayed_slots_TK = nullptr;
    std::int32_t num_own_slots = 0;
    std::int32_t num_relayed_slots = 0;
    std::vector<RowSegment> sent;
    std::vector<RowSegment> received;
  };

  void list_tokens(const CpuCallState& state);
  void add_tokens(Peer& peer, const StageContext& stage, const CpuCallState& state);
  void publish(const StageContext& stage, const CpuCallState& state, PlanScratch& scratch);
  void transfer(const char* what, double deadline_s);

  Topology topology_;
  int rank_;
  Network* network_;  ///< null on one host
  HostRouting routing_;
  std::vector<Peer> peers_;
  std::vector<Message> sends_;
  std::vector<Message> receives_;
};

}  // namespace megamoe::cpu
