#include "gpu/at_launch.h"

#include <utility>

#include "cuda/runtime.h"

namespace megamoe::verify {
namespace {

thread_local AtLaunch* awaited = nullptr;

}  // namespace

AtLaunch::AtLaunch(std::string kernel, int number, std::function<void(cudaStream_t)> action)
    : kernel_(std::move(kernel)), number_(number), action_(std::move(action)) {
  awaited = this;
}

AtLaunch::~AtLaunch() { awaited = nullptr; }

void AtLaunch::look_at(const void* kernel, cudaStream_t stream) {
  if (has_come()) return;
  const char* name = nullptr;
  cuda::check(cudaFuncGetName(&name, kernel), "the name of a kernel");
  if (std::string(name).find(kernel_) == std::string::npos) return;
  if (--number_ == 0) action_(stream);
}

}  // namespace megamoe::verify

// NOLINTBEGIN(bugprone-reserved-identifier): the linker's names.
extern "C" cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                                  const void* kernel, void** arguments);
extern "C" cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                                  const void* kernel, void** arguments);
extern "C" cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                                  const void* kernel, void** arguments) {
  using megamoe::verify::awaited;
  if (awaited != nullptr) awaited->look_at(kernel, config->stream);
  return __real_cudaLaunchKernelExC(config, kernel, arguments);
}
// NOLINTEND(bugprone-reserved-identifier)
