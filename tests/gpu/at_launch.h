// What a test does in the middle of a call: where the host launches a product. The linker puts a
// function that looks for it in place of CUDA's (--wrap, CMakeLists.txt).
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace megamoe::verify {

/// While it lives, before this thread launches for the `number`-th time (from 1) a product kernel
/// whose name contains `kernel`: `action`, with the stream, which may throw or not return.
class AtLaunch {
 public:
  AtLaunch(std::string kernel, int number, std::function<void(cudaStream_t)> action);
  AtLaunch(const AtLaunch&) = delete;
  AtLaunch& operator=(const AtLaunch&) = delete;
  ~AtLaunch();

  [[nodiscard]] bool has_come() const { return number_ == 0; }
  void look_at(const void* kernel, cudaStream_t stream);

 private:
  std::string kernel_;
  int number_;  ///< of launches to come
  std::function<void(cudaStream_t)> action_;
};

}  // namespace megamoe::verify
