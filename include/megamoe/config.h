// What one Mixture-of-Experts layer is and how it runs. Shapes: T tokens on a rank, H hidden, I
// intermediate, E experts, R ranks, e = E/R experts of a rank, K slots of a token, N rows that a
// rank receives.
#pragma once

#include <cstdint>
#include <string>

namespace megamoe {

/// The shape of a layer; equal on all ranks of the group.
struct MoeShape {
  std::int64_t max_tokens = 0;        ///< largest T of any rank in any call
  std::int64_t hidden_dim = 0;        ///< H
  std::int64_t intermediate_dim = 0;  ///< I
  std::int32_t num_experts = 0;       ///< E, over all ranks; divisible by R
  std::int32_t top_k = 0;             ///< K
};

/// a = act(g) * u. The last two have no gate: a depends on u = up x alone, `gate` tensors must be
/// absent.
enum class ActivationKind : std::uint8_t {
  swiglu,          ///< silu(g) * u
  clamped_swiglu,  ///< silu(min(g, L)) * clamp(u, -L, L)
  gelu_erf,        ///< gelu(g) * u, exact
  gelu_tanh,       ///< gelu(g) * u, tanh approximation
  relu2,           ///< relu(u)^2
  identity,        ///< u
};

struct Activation {
  ActivationKind kind = ActivationKind::swiglu;
  float limit = 7.0F;  ///< L of clamped_swiglu; positive and finite; otherwise unused
};

/// True where the activation reads a gate product.
constexpr bool is_gated(ActivationKind kind) {
  return kind != ActivationKind::relu2 && kind != ActivationKind::identity;
}
const char* to_string(ActivationKind kind);

/// What a forward pass keeps for its backward pass. Results are bit-equal.
enum class MemoryMode : std::uint8_t {
  saved,      ///< g and u of up to `saved_row_capacity` rows (4*I bytes a row; 2*I when ungated)
  recompute,  ///< neither: gate and up products run again in the backward pass
};

/// Whether communication runs under computation. Results are bit-equal. The CPU backend has one
/// order and takes either value.
enum class Overlap : std::uint8_t { on, off };

enum class WeightGradientMode : std::uint8_t {
  store_bf16,       ///< bf16 tensors, overwritten
  store_fp32,       ///< fp32 tensors, overwritten
  accumulate_fp32,  ///< fp32 tensors (main_grad), the call's gradient is added once
};

enum class Backend : std::uint8_t { cpu, cuda };

/// Everything that must be equal on all ranks (checked at construction), and how to run.
struct LayerConfig {
  MoeShape shape;
  Activation activation;
  MemoryMode memory_mode = MemoryMode::saved;
  Overlap overlap = Overlap::on;
  WeightGradientMode weight_gradient_mode = WeightGradientMode::store_bf16;
  Backend backend = Backend::cpu;

  /// Rows a rank can receive in one call; 0 takes min(R, 2) * max_tokens * K, or 1. A call that
  /// needs more fails on every rank with ErrorCode::capacity_exceeded and leaves the layer usable.
  std::int64_t row_capacity = 0;
  /// Rows whose g and u are kept (MemoryMode::saved); rows beyond it are recomputed.
  /// 0 takes min(row capacity, 1.25 * max_tokens * K).
  std::int64_t saved_row_capacity = 0;

  /// Seconds that a call waits for peers to enter it (one may be writing a checkpoint), and for
  /// anything after that; at most 1e8 count. A missed deadline leaves the communicator unusable.
  double entry_deadline_s = 600.0;
  double inner_deadline_s = 60.0;

  /// Multiprocessors of this rank's GPU that products take, in pairs; 0, or more than it has: all
  /// of them. Ranks that share a GPU divide them. CUDA backend.
  int num_sms = 0;
  /// Threads of this rank on the CPU backend; 0 divides the machine's cores among the ranks.
  int num_threads = 0;
};

/// The capacities after defaults are filled in, for a group of `num_ranks`.
std::int64_t resolved_row_capacity(const LayerConfig& config, int num_ranks);
std::int64_t resolved_saved_row_capacity(const LayerConfig& config, int num_ranks);

/// Throws Error (invalid_argument, unsupported or, for E not divisible by R, invalid_argument)
/// naming the member that is wrong.
void validate(const LayerConfig& config, int num_ranks);

}  // namespace megamoe
