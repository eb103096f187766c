// A stack of layers as a training step runs it: each with its own weights and gradients, all on one
// workspace, each layer's output the next one's input.
//
// Shapes: T tokens of a rank, H hidden, I intermediate, E experts, e = E/R of a rank, K slots, L
// layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "megamoe/layer.h"

namespace megamoe::bench {

/// What a rank needs for a stack. Plans, ids and weights of slots are not counted: they are small.
struct StepState {
  std::int64_t weights = 0;
  std::int64_t weight_gradients = 0;
  std::int64_t activations = 0;  ///< every layer's input, the last one's output, dy and dx
  std::int64_t kept = 0;         ///< g and u (MemoryMode::saved)
  std::int64_t workspace = 0;

  [[nodiscard]] std::int64_t total() const {
    return weights + weight_gradients + activations + kept + workspace;
  }
};
StepState step_state(const LayerConfig& config, int num_ranks, std::int64_t num_layers);

constexpr double gigabytes(std::int64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

/// Throws Error (out_of_memory) naming what is needed and what there is, where `ranks` ranks with
/// `state` each do not fit `available_bytes` of `place`.
void require_memory(const StepState& state, int ranks, std::int64_t available_bytes,
                    const char* place);

/// Memory that a backend's layers read and write.
class StackMemory {
 public:
  StackMemory() = default;
  StackMemory(const StackMemory&) = delete;
  StackMemory& operator=(const StackMemory&) = delete;
  virtual ~StackMemory() = default;

  /// Zeroed.
  virtual std::shared_ptr<std::byte> allocate(std::int64_t bytes) = 0;
  virtual void upload(std::byte* to, const void* host, std::int64_t bytes) = 0;
  /// Within the memory.
  virtual void copy(std::byte* to, const std::byte* from, std::int64_t bytes) = 0;
};

/// One rank's stack.
class LayerStack {
 public:
  /// Collective. `ids_TK` routes the tokens of every layer. The group and the memory must outlive
  /// the stack.
  LayerStack(const LayerConfig& config, std::int64_t num_layers, Communicator& group,
             StackMemory& memory, const std::vector<std::int32_t>& ids_TK);

  /// The first `num_layers` layers. Collective.
  void forward(std::int64_t num_layers, Stream stream);
  /// Of the last forward: from the last of its layers to the first.
  void backward(std::int64_t num_layers, Stream stream);
  /// Waits, and throws what the layers have found.
  void check(Stream stream);

 private:
  using Tensor = std::shared_ptr<std::byte>;
  struct OneLayer {
    Tensor gate, up, down, d_gate, d_up, d_down;
    std::unique_ptr<MoeLayer> layer;
    CallContext call;
  };
  Tensor noise(std::int64_t count, double deviation, std::uint64_t seed);
  [[nodiscard]] ExpertWeights weights_of(const OneLayer& one) const;
  [[nodiscard]] ExpertGradients gradients_of(const OneLayer& one) const;

  std::int64_t T_, H_, I_, K_, e_;
  DType gradient_dtype_;
  StackMemory& memory_;
  Workspace workspace_;
  std::vector<Tensor> x_TH_;  // L + 1
  Tensor dy_TH_;              // of the last layer
  Tensor gradients_TH_[2];    // dx of a layer is dy of the one before it
  Tensor ids_TK_, weights_TK_, d_weights_TK_;
  std::vector<OneLayer> layers_;
};

}  // namespace megamoe::bench
