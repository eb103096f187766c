// The CPU backend: the protocol of a call around the stages of reference.h.
#pragma once

#include "cpu/buffers.h"
#include "cpu/call_state.h"
#include "cpu/reference.h"
#include "cpu/relay.h"
#include "cpu/workspace.h"
#include "layer/backend.h"
#include "layer/call_entry.h"
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
  StageContext stage_context();
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
  CallEntry entry_;  ///< counts are counts_E, then crossing_S
};

}  // namespace megamoe::cpu
