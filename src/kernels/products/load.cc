// Every kernel of the products that is launched alone.
#include "base/activation.h"
#include "kernels/launch.h"
#include "kernels/products/entries.h"
#include "kernels/products/products.h"

namespace megamoe::products {
namespace {

template <class Gated>
void load_gated() {
  gpu::load_kernel(row_product_with<RowProduct::gate_up, Gated>());
  gpu::load_kernel(row_product_with<RowProduct::gate_up_saving, Gated>());
  gpu::load_kernel(gate_up_gradient_with<Gated>());
}
template <class Ungated>
void load_ungated() {
  gpu::load_kernel(row_product_with<RowProduct::up, Ungated>());
  gpu::load_kernel(row_product_with<RowProduct::up_saving, Ungated>());
  gpu::load_kernel(gate_up_gradient_with<Ungated>());
}

}  // namespace

void load_product_kernels() {
  for (const void* kernel :
       {down_sharing_rows(), down_sharing_channels(), gate_up_sharing_rows(),
        gate_up_sharing_channels(), gate_up_saving_sharing_rows(),
        gate_up_saving_sharing_channels(), dx_sharing_rows(), dx_sharing_channels(),
        weight_gradient_bf16_sharing_rows(), weight_gradient_bf16_sharing_channels(),
        weight_gradient_fp32_in_pairs(), weight_gradient_fp32_in_fours(),
        gate_up_gradient_sharing_rows(), gate_up_gradient_sharing_channels()}) {
    gpu::load_kernel(kernel);
  }
  load_gated<ClampedSwiGlu>();
  load_gated<GeluErf>();
  load_gated<GeluTanh>();
  load_ungated<Relu2>();
  load_ungated<Identity>();
}

}  // namespace megamoe::products
