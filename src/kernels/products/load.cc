#include <string>
#include <vector>

#include "base/activation.h"
#include "kernels/products/entries.h"
#include "kernels/products/products.h"
#include "megamoe/error.h"

namespace megamoe::products {
namespace {

template <class Policy>
void add_kernels_with(std::vector<const void*>& kernels) {
  if constexpr (Policy::kGated) {
    kernels.push_back(row_product_with<RowProduct::gate_up, Policy>());
    kernels.push_back(row_product_with<RowProduct::gate_up_saving, Policy>());
  } else {
    kernels.push_back(row_product_with<RowProduct::up, Policy>());
    kernels.push_back(row_product_with<RowProduct::up_saving, Policy>());
  }
  kernels.push_back(gate_up_gradient_with<Policy>());
}

}  // namespace

void load_product_kernels() {
  std::vector<const void*> kernels = {down_sharing_rows(),
                                      down_sharing_channels(),
                                      gate_up_sharing_rows(),
                                      gate_up_sharing_channels(),
                                      gate_up_saving_sharing_rows(),
                                      gate_up_saving_sharing_channels(),
                                      dx_sharing_rows(),
                                      dx_sharing_channels(),
                                      weight_gradient_bf16_sharing_rows(),
                                      weight_gradient_bf16_sharing_channels(),
                                      weight_gradient_fp32_sharing_rows(),
                                      weight_gradient_fp32_sharing_channels(),
                                      gate_up_gradient_sharing_rows(),
                                      gate_up_gradient_sharing_channels()};
  add_kernels_with<ClampedSwiGlu>(kernels);
  add_kernels_with<GeluErf>(kernels);
  add_kernels_with<GeluTanh>(kernels);
  add_kernels_with<Relu2>(kernels);
  add_kernels_with<Identity>(kernels);
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) {
      throw Error(ErrorCode::internal,
                  std::string("loading a product kernel: ") + cudaGetErrorString(status));
    }
  }
}

}  // namespace megamoe::products
