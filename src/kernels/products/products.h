// The products of an MoE layer over rows grouped by expert, on one GPU. Host interface; everything
// runs on `options.stream`.
//
// Shapes: N row capacity, H hidden, I intermediate, e experts. H and I are multiples of 64, rows
// bf16 with 16-byte aligned rows. Expert j's rows are [begin[j], begin[j] + count[j]); begin[j] is
// a multiple of 64. begin and count live on the device and may differ at every call; the host never
// reads them. Rows up to the next multiple of 16 may be written.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megamoe/tensor.h"

namespace megamoe::products {

struct GroupedRows {
  const std::int32_t* begin = nullptr;  ///< [num_groups], device memory
  const std::int32_t* count = nullptr;  ///< [num_groups], device memory
  int num_groups = 0;
};

/// Which operand the two CTAs of a cluster share; `automatic` takes the documented heuristic. Bits
/// do not depend on it.
enum class Sharing { automatic, rows, channels };

struct LaunchOptions {
  cudaStream_t stream = nullptr;
  int num_sms = 0;  ///< 0: all of the device
  Sharing sharing = Sharing::automatic;
};

/// o[N, H] = a[N, I] down[e, H, I]^T.
void multiply_down(const GroupedRows& rows, const ConstTensorView& a_NI,
                   const ConstTensorView& down_eHI, const TensorView& o_NH,
                   const LaunchOptions& options);

/// a[N, I] = bf16(act(g) u) of g = bf16(x gate^T), u = bf16(x up^T), SwiGLU; g and u are stored too
/// unless absent.
void multiply_gate_up(const GroupedRows& rows, const ConstTensorView& x_NH,
                      const ConstTensorView& gate_eIH, const ConstTensorView& up_eIH,
                      const TensorView& g_NI, const TensorView& u_NI, const TensorView& a_NI,
                      const LaunchOptions& options);

/// dx[N, H] = dg[N, I] gate[e, I, H] + du[N, I] up[e, I, H], one chain over all of dg and then all
/// of du.
void multiply_dx(const GroupedRows& rows, const ConstTensorView& dg_NI,
                 const ConstTensorView& du_NI, const ConstTensorView& gate_eIH,
                 const ConstTensorView& up_eIH, const TensorView& dx_NH,
                 const LaunchOptions& options);

}  // namespace megamoe::products
