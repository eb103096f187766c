// The expert-parallel Mixture-of-Experts layer: y_t = sum_k w_tk * down_j act(gate_j x_t, up_j
// x_t), j = expert_ids[t, k], forward and backward, over the ranks of a communicator.
//
// Shapes (legend in config.h). Every call is collective: all ranks make it, in the same order, also
// a rank without tokens. Errors that a rank can see before data moves (arguments, ids, capacity)
// are thrown on all ranks, prefixed "rank r:" on the others, and leave the layer usable.
#pragma once

#include <cstdint>
#include <memory>

#include "megamoe/communicator.h"
#include "megamoe/config.h"
#include "megamoe/error.h"
#include "megamoe/tensor.h"

namespace megamoe {

/// Bytes of the workspace of one rank: what peers can reach, and what only the rank itself uses.
struct WorkspaceBytes {
  std::int64_t symmetric = 0;
  std::int64_t local = 0;
  [[nodiscard]] std::int64_t total() const { return symmetric + local; }
};

/// Exactly what a Workspace for this configuration allocates on each rank of one host. Throws as
/// validate() does.
WorkspaceBytes workspace_bytes(const LayerConfig& config, int num_ranks);
/// The same for ranks on several hosts: symmetric memory is as large again for each other host.
WorkspaceBytes workspace_bytes(const LayerConfig& config, const Topology& topology);

/// Buffers that live for the length of a call; shared by all layers of a model whose needs fit.
/// Construction is collective. Two threads may not use one workspace at the same time: refused.
/// CUDA calls of one communicator run in the order in which they are enqueued, on whatever
/// workspaces and streams; that order must be the same on all ranks.
class Workspace {
 public:
  Workspace(const LayerConfig& config, Communicator& communicator);
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;
  ~Workspace();

  [[nodiscard]] WorkspaceBytes bytes() const;

  struct Impl;
  [[nodiscard]] Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// Weights of this rank's experts [rank*e, (rank+1)*e): any expert stride and row stride, columns
/// contiguous. expert_rows() in tensor.h reads the fused [e, 2I, H] layout in place.
struct ExpertWeights {
  ConstTensorView gate;  ///< [e, I, H] bf16; absent for ungated activations
  ConstTensorView up;    ///< [e, I, H] bf16
  ConstTensorView down;  ///< [e, H, I] bf16
};

/// Gradients of the weights, in the dtype of LayerConfig::weight_gradient_mode. Each is the plain
/// sum over the tokens of all ranks: it is not divided by the number of ranks or tokens.
struct ExpertGradients {
  TensorView gate;
  TensorView up;
  TensorView down;
};

struct ForwardInput {
  ConstTensorView x;           ///< [T, H] bf16, columns contiguous
  ConstTensorView expert_ids;  ///< [T, K] int32; -1 is an empty slot; an expert may be named twice
  ConstTensorView weights;     ///< [T, K] fp32; not read where the slot is empty
  ExpertWeights experts;
};

struct ForwardOutput {
  TensorView y;  ///< [T, H] bf16; 0 for a token whose slots are all empty
};

struct BackwardInput {
  ConstTensorView x;   ///< the x of the forward call
  ConstTensorView dy;  ///< [T, H] bf16
  ExpertWeights experts;
};

struct BackwardOutput {
  TensorView dx;        ///< [T, H] bf16
  TensorView dweights;  ///< [T, K] fp32; exactly 0 for empty slots
  ExpertGradients experts;
};

/// A CUDA stream (cudaStream_t) of the CUDA backend; ignored by the CPU backend.
struct Stream {
  void* handle = nullptr;
};

struct CallState;     // internal
class CallStatePool;  // internal

/// What a forward call leaves for its backward call: plan, ids, weights and, with
/// MemoryMode::saved, g and u. Any number may be alive; destroying one gives its memory back to the
/// layer for the next forward, that of a call which was captured in a CUDA graph once the graph and
/// what was instantiated from it are destroyed as well. It may outlive its layer.
class CallContext {
 public:
  CallContext();
  CallContext(CallContext&&) noexcept;
  CallContext& operator=(CallContext&&) noexcept;
  ~CallContext();

  // With CUDA both wait, once, for the stream of the forward call, which must still exist.
  /// Rows that this rank received, N; 0 for an empty context.
  [[nodiscard]] std::int64_t num_rows() const;
  /// Rows received for each of this rank's experts: e numbers. Null for an empty context.
  [[nodiscard]] const std::int64_t* rows_per_expert() const;

 private:
  friend class MoeLayer;
  CallContext(std::shared_ptr<CallStatePool> pool, std::unique_ptr<CallState> state);
  std::shared_ptr<CallStatePool> pool_;
  std::unique_ptr<CallState> state_;
};

class MoeLayer {
 public:
  /// Collective. Throws config_mismatch on every rank, naming the member and the ranks, where the
  /// configurations differ; invalid_argument when the workspace is too small or the communicator is
  /// another one. The communicator and the workspace must outlive the layer.
  MoeLayer(const LayerConfig& config, Communicator& communicator, Workspace& workspace);
  MoeLayer(MoeLayer&&) noexcept;
  MoeLayer& operator=(MoeLayer&&) noexcept;
  ~MoeLayer();

  /// Writes y. With the CPU backend y is complete on return; with CUDA it is in stream order.
  /// Throws invalid_argument, unsupported, expert_id_out_of_range (naming value, token and slot),
  /// capacity_exceeded (naming need, capacity and option), peer_failed or deadline_exceeded.
  CallContext forward(const ForwardInput& input, const ForwardOutput& output, Stream stream = {});

  /// Writes dx, dweights and the weight gradients of the forward call that made `context`; may be
  /// called in any order of contexts, the same on all ranks. Throws as forward() does.
  void backward(const CallContext& context, const BackwardInput& input,
                const BackwardOutput& output, Stream stream = {});

  /// Waits for the stream and for all calls of the communicator, and throws what the device has
  /// reported since the last check; invalid_argument for a stream that is being captured. Nothing
  /// to wait for on the CPU backend.
  void check(Stream stream = {});

  /// Whether a CUDA graph exists in which a call of this layer was captured. Its replays use the
  /// layer and the workspace, which must outlive it.
  [[nodiscard]] bool is_in_graph() const;

  [[nodiscard]] const LayerConfig& config() const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace megamoe
