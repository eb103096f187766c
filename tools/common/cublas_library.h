// Dense products through cuBLAS, which is loaded when it is first needed: the command also runs
// where there is none.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace megamoe::tools {

/// Why cuBLAS (libcublas.so.13 or .12) cannot be loaded; empty where it can.
const std::string& why_no_cublas();

enum class Layout : std::uint8_t { as_named, transposed };

/// The row-major product c_MN = a b, or c_MN += a b. `a` is a_MK, or a_KM where it is transposed,
/// `b` is b_KN or b_NK. All on the current device.
struct MatrixProduct {
  enum class Element : std::uint8_t { bf16, fp32 };
  enum class Write : std::uint8_t { store, add };

  Element element;
  std::int64_t m, n, k;
  const void* a;
  Layout a_layout;
  const void* b;
  Layout b_layout;
  void* c;
  Write write;
};

/// A handle of one device and stream: products on it run in order, and two runs of one give equal
/// bits. Throws Error (unsupported) where cuBLAS cannot be loaded, (internal) where it fails.
class Cublas {
 public:
  explicit Cublas(cudaStream_t stream);
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas();

  /// Sums in fp32; fp32 elements are multiplied as such, never as TF32.
  void multiply(const MatrixProduct& product) const;

 private:
  void* handle_ = nullptr;
};

}  // namespace megamoe::tools
