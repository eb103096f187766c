#include "bench/dense_product.h"

#include <cublas_v2.h>
#include <dlfcn.h>

#include "megamoe/error.h"

namespace megamoe::bench {
namespace {

// Spelt out: the header overloads the name.
using GemmEx = cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int,
                                  int, const void*, const void*, cudaDataType, int, const void*,
                                  cudaDataType, int, const void*, void*, cudaDataType, int,
                                  cublasComputeType_t, cublasGemmAlgo_t);

struct Library {
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  GemmEx gemm = nullptr;
};

/// Null members where there is none.
Library open() {
  Library library;
  for (const char* file : {"libcublas.so.13", "libcublas.so.12"}) {
    void* handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) continue;
    library.create = reinterpret_cast<decltype(library.create)>(dlsym(handle, "cublasCreate_v2"));
    library.destroy =
        reinterpret_cast<decltype(library.destroy)>(dlsym(handle, "cublasDestroy_v2"));
    library.set_stream =
        reinterpret_cast<decltype(library.set_stream)>(dlsym(handle, "cublasSetStream_v2"));
    library.gemm = reinterpret_cast<GemmEx>(dlsym(handle, "cublasGemmEx"));
    break;
  }
  return library;
}

const Library& library() {
  static const Library loaded = open();
  return loaded;
}

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(ErrorCode::internal,
              std::string(what) + ": cuBLAS status " + std::to_string(static_cast<int>(status)));
}

}  // namespace

DenseProduct::DenseProduct(cudaStream_t stream) {
  if (library().create == nullptr || library().gemm == nullptr) return;
  cublasHandle_t handle = nullptr;
  check(library().create(&handle), "cublasCreate");
  handle_ = handle;
  check(library().set_stream(handle, stream), "cublasSetStream");
}

DenseProduct::~DenseProduct() {
  if (handle_ != nullptr) library().destroy(static_cast<cublasHandle_t>(handle_));
}

void DenseProduct::multiply(std::int64_t size, const void* a, const void* b, void* c) const {
  const float one = 1.0F;
  const float zero = 0.0F;
  const int n = static_cast<int>(size);
  // cuBLAS thinks in columns: c^T = b^T a^T is the row-major c = a b.
  check(library().gemm(static_cast<cublasHandle_t>(handle_), CUBLAS_OP_N, CUBLAS_OP_N, n, n, n,
                       &one, b, CUDA_R_16BF, n, a, CUDA_R_16BF, n, &zero, c, CUDA_R_16BF, n,
                       CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
}

}  // namespace megamoe::bench
