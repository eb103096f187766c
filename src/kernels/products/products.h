// The products of an MoE layer over rows grouped by expert, on one GPU. Host interface; everything
// runs on `options.stream`.
//
// Shapes: N row capacity, H hidden, I intermediate, e experts. H and I are multiples of 64, rows
// bf16 with 16-byte aligned rows. Expert j's rows are [begin[j], begin[j] + count[j]); begin[j] is
// a multiple of 64. begin and count live on the device and may differ at every call; the host never
// reads them. Rows up to the next multiple of 16 may be written.
//
// Activations without a gate (is_gated): g, dg, gate and what belongs to them must be absent.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>

#include "device/call_control.h"
#include "megamoe/config.h"
#include "megamoe/tensor.h"
#include "trace/region.h"

namespace megamoe::device {
class TensorMapCache;
}

namespace megamoe::products {

/// Loads the code of every product on the current device; before the first call where a kernel that
/// runs may wait for one that is launched later (a first launch that loads code may wait for it).
void load_product_kernels();

struct GroupedRows {
  const std::int32_t* begin = nullptr;  ///< [num_groups], device memory
  const std::int32_t* count = nullptr;  ///< [num_groups], device memory
  int num_groups = 0;
};

/// Which operand the two CTAs of a cluster share; `automatic` takes the documented heuristic. Bits
/// do not depend on it. Kernels with an activation other than SwiGLU always share channels.
enum class Sharing { automatic, rows, channels };

struct LaunchOptions {
  cudaStream_t stream = nullptr;
  int num_sms = 0;  ///< 0: all of the device
  Sharing sharing = Sharing::automatic;
  int expected_group_rows = 0;  ///< a hint for `automatic`, rows an expert on average; 0: unknown
  device::TensorMapCache* tensor_maps = nullptr;  ///< null: every map is encoded anew
  device::ProductEnds* ends = nullptr;  ///< [kNumProductKinds], device memory; null: not measured
  trace::Launches* trace = nullptr;     ///< builds with MEGAMOE_TRACE: where the launch is recorded
};

/// Tells a product's kernel where its CTAs are to leave when they did what.
template <class Params>
void set_measured(Params& params, const LaunchOptions& options, device::ProductKind product) {
  params.ends = options.ends == nullptr ? nullptr : options.ends + static_cast<int>(product);
  params.trace_region = trace::next_region(options.trace, product);
}

/// o[N, H] = a[N, I] down[e, H, I]^T.
void multiply_down(const GroupedRows& rows, const ConstTensorView& a_NI,
                   const ConstTensorView& down_eHI, const TensorView& o_NH,
                   const LaunchOptions& options);

/// a[N, I] = bf16(act(g) u) of g = bf16(x gate^T), u = bf16(x up^T); g and u are stored too unless
/// u is absent, as far as they have rows: they may have fewer than N.
void multiply_gate_up(const GroupedRows& rows, const Activation& activation,
                      const ConstTensorView& x_NH, const ConstTensorView& gate_eIH,
                      const ConstTensorView& up_eIH, const TensorView& g_NI, const TensorView& u_NI,
                      const TensorView& a_NI, const LaunchOptions& options);

/// dx[N, H] = dg[N, I] gate[e, I, H] + du[N, I] up[e, I, H], one chain over all of dg and then all
/// of du. Without a gate (dg and gate absent) du up alone.
void multiply_dx(const GroupedRows& rows, const ConstTensorView& dg_NI,
                 const ConstTensorView& du_NI, const ConstTensorView& gate_eIH,
                 const ConstTensorView& up_eIH, const TensorView& dx_NH,
                 const LaunchOptions& options);

/// What follows p[N, I] = dy[N, H] down[e, H, I], which itself is never stored.
struct GateUpGradientOutputs {
  TensorView dg_NI;
  TensorView du_NI;
  TensorView wa_NI;  ///< bf16(w a), with a = bf16(act(g) u) from the given g and u
  float* dw_segments =
      nullptr;  ///< [I / 64, N]: sums of p * a over 64 channels each, to be added in order
};

/// dg = w p u act'(g), du = w p act(g). Pad rows up to the next multiple of 16 are written
/// as zeros. row_weights[N] fp32; N is a multiple of 16. g and u must have the rows of the groups,
/// may have fewer than N, and may be dg and du themselves.
void multiply_gate_up_gradient(const GroupedRows& rows, const Activation& activation,
                               const ConstTensorView& dy_NH, const ConstTensorView& down_eHI,
                               const ConstTensorView& g_NI, const ConstTensorView& u_NI,
                               const float* row_weights, const GateUpGradientOutputs& outputs,
                               const LaunchOptions& options);

/// One weight gradient: gradient[e, R, C] (+)= sum over expert e's rows of lines[row, R]^T
/// channels[row, C]. d_down[e, H, I]: lines dy, channels w a. d_gate[e, I, H]: lines dg, channels
/// x. d_up[e, I, H]: lines du, channels x.
struct WeightGradient {
  ConstTensorView lines_NR;
  ConstTensorView channels_NC;
  TensorView gradient_eRC;  ///< bf16 or fp32
};

enum class GradientMode {
  store,
  accumulate
};  ///< accumulate: fp32 only, added once to each element

/// All gradients, of one dtype, in one launch; nothing is written where `*cancelled` (device
/// memory, may be null) is not 0. Operand rows from an expert's last row to the next multiple of 16
/// must be zero. An expert without rows gets exact zeros, or, accumulating, stays as it was.
/// Clusters take tiles from the counter `*num_tiles_taken` (device memory, set to 0 by this call),
/// or, where it is null, in turn.
void multiply_weight_gradients(const GroupedRows& rows, std::span<const WeightGradient> gradients,
                               GradientMode mode, const LaunchOptions& options,
                               const std::uint32_t* cancelled = nullptr,
                               std::uint32_t* num_tiles_taken = nullptr);

}  // namespace megamoe::products
