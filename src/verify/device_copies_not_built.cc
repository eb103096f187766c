// A build without CUDA.
#include "verify/device_copies.h"

namespace megamoe::verify {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported,
              "backend cuda: this build has none (MEGAMOE_CUDA is off); use the cpu backend");
}

}  // namespace

struct DeviceCopies::Impl {};

int cuda_device_of(int /*rank*/, int /*num_ranks*/) { return 0; }
DeviceCopies::DeviceCopies(int /*device*/) { refuse(); }
DeviceCopies::~DeviceCopies() = default;
ConstTensorView DeviceCopies::upload(const ConstTensorView& /*host*/) { refuse(); }
TensorView DeviceCopies::upload(const TensorView& /*host*/) { refuse(); }
void DeviceCopies::download(const TensorView& /*host*/) { refuse(); }
Stream DeviceCopies::stream() const { refuse(); }

}  // namespace megamoe::verify
