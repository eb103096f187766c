#include <string>

#include "kernels/products/entries.h"
#include "kernels/products/products.h"
#include "megamoe/error.h"

namespace megamoe::products {

void load_product_kernels() {
  for (const void* kernel :
       {down_sharing_rows(), down_sharing_channels(), gate_up_sharing_rows(),
        gate_up_sharing_channels(), gate_up_saving_sharing_rows(),
        gate_up_saving_sharing_channels(), dx_sharing_rows(), dx_sharing_channels(),
        weight_gradient_bf16_sharing_rows(), weight_gradient_bf16_sharing_channels(),
        weight_gradient_fp32_sharing_rows(), weight_gradient_fp32_sharing_channels(),
        gate_up_gradient_sharing_rows(), gate_up_gradient_sharing_channels()}) {
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) {
      throw Error(ErrorCode::internal,
                  std::string("loading a product kernel: ") + cudaGetErrorString(status));
    }
  }
}

}  // namespace megamoe::products
