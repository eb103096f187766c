// The CPU backend: the protocol of a call around the stages of reference.h.
#pragma once

#include <array>
#include <vector>

#include "cpu/buffers.h"
#include "cpu/call_state.h"
#include "cpu/reference.h"
#include "cpu/relay.h"
#include "cpu/workspace.h"
#include "layer/agreement.h"
#include "layer/backend.h"
#include "layer/validate.h"
#include "layer/workspace.h"

namespace megamoe::cpu {

class CpuBackend final : public LayerBackend {
 public:
  /// `workspace` is large enough and outlives the backend. Collective only in that layers are
  /// numbered.
  CpuBackend(const LayerConfig& config, Workspace::Impl& workspace);

  void forward(std::unique_ptr<CallState>& state, const ForwardInput& input,
               const ForwardOutput& output, Stream stream) override;
  void backward(const CallState* state, const BackwardInput& input, const BackwardOutput& output,
                Stream stream) override;
  void check(Stream stream) override;

 private:
  [[nodiscard]] std::unique_ptr<CallState> new_call_state() const;
  enum class CallKind : std::int32_t { forward, backward };

  /// What ranks tell each other on entry; a forward call appends its counts_E and crossing_S.
  struct CallHeader {
    CallKind kind;
    std::uint64_t workspace_id;
    std::int64_t layer_number;
    std::int64_t forward_number;  ///< of a backward call: which forward call it belongs to
    LocalOutcome outcome;
  };

  StageContext stage_context();
  void enter(const CallHeader& mine);
  void check_headers();
  void read_routing(CpuCallState& state, const ForwardInput& input, std::int64_t num_tokens);
  void plan_rows(CpuCallState& state);
  void barrier(const char* what);

  LayerConfig config_;
  Workspace::Impl& workspace_;
  Communicator& group_;
  WorkspaceDims dims_;
  ExpectedShape expected_;
  CpuWorkspace& memory_;
  Relay relay_;
  Buffers buffers_;
  std::int64_t layer_number_;
  std::vector<std::int32_t> counts_E_;
  std::vector<std::int32_t> crossing_S_;
  std::vector<std::byte> entry_;      ///< this rank's header, counts and crossing tokens
  std::vector<std::byte> entries_R_;  ///< everybody's
};

}  // namespace megamoe::cpu
