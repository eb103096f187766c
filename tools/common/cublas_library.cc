#include "common/cublas_library.h"

#include <cublas_v2.h>
#include <dlfcn.h>

#include "megamoe/error.h"

namespace megamoe::tools {
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
  std::string why_not;
};

template <class Function>
void find(void* handle, const char* name, Function& function, std::string& why_not) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) why_not = std::string("cuBLAS has no ") + name;
}

Library open() {
  Library library;
  library.why_not = "cuBLAS cannot be loaded:";
  for (const char* file : {"libcublas.so.13", "libcublas.so.12"}) {
    void* handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      library.why_not += std::string(" ") + dlerror() + ";";
      continue;
    }
    library.why_not.clear();
    find(handle, "cublasCreate_v2", library.create, library.why_not);
    find(handle, "cublasDestroy_v2", library.destroy, library.why_not);
    find(handle, "cublasSetStream_v2", library.set_stream, library.why_not);
    find(handle, "cublasGemmEx", library.gemm, library.why_not);
    return library;
  }
  library.why_not +=
      " it comes with CUDA, with PyTorch and as nvidia-cublas from PyPI; its folder "
      "belongs into LD_LIBRARY_PATH";
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

const std::string& why_no_cublas() { return library().why_not; }

Cublas::Cublas(cudaStream_t stream) {
  if (!why_no_cublas().empty()) throw Error(ErrorCode::unsupported, why_no_cublas());
  cublasHandle_t handle = nullptr;
  check(library().create(&handle), "cublasCreate");
  handle_ = handle;
  check(library().set_stream(handle, stream), "cublasSetStream");
}

Cublas::~Cublas() {
  if (handle_ != nullptr) library().destroy(static_cast<cublasHandle_t>(handle_));
}

void Cublas::multiply(const MatrixProduct& product) const {
  if (product.m == 0 || product.n == 0) return;
  const float one = 1.0F;
  const float beta = product.write == MatrixProduct::Write::add ? 1.0F : 0.0F;
  const bool is_fp32 = product.element == MatrixProduct::Element::fp32;
  const cudaDataType type = is_fp32 ? CUDA_R_32F : CUDA_R_16BF;
  const auto operation = [](Layout layout) {
    return layout == Layout::transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  };
  const int m = static_cast<int>(product.m);
  const int n = static_cast<int>(product.n);
  const int k = static_cast<int>(product.k);
  // cuBLAS thinks in columns: c^T = b^T a^T is the row-major c = a b.
  check(library().gemm(static_cast<cublasHandle_t>(handle_), operation(product.b_layout),
                       operation(product.a_layout), n, m, k, &one, product.b, type,
                       product.b_layout == Layout::transposed ? k : n, product.a, type,
                       product.a_layout == Layout::transposed ? m : k, &beta, product.c, type, n,
                       is_fp32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F,
                       CUBLAS_GEMM_DEFAULT),
        "cublasGemmEx");
}

}  // namespace megamoe::tools
