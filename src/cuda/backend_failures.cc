// How calls of the CUDA backend are refused, given up and checked.
#include <chrono>
#include <exception>
#include <string>
#include <thread>

#include "cuda/backend.h"
#include "kernels/failure.h"

namespace megamoe::cuda {

/// Sticky: only check(), which all ranks make at the same point, takes a failure away. Until then
/// every call fails, so that the ranks' calls stay paired.
void CudaBackend::throw_recorded_failure() const {
  if (memory_.given_up) throw Error(*memory_.given_up);
  const volatile device::FailureRecord* record = memory_.failure.get();
  if (record->is_set != 0) throw gpu::to_error(*memory_.failure.get());
}

void CudaBackend::or_refuse(gpu::CallKind kind, cudaStream_t stream,
                            const std::function<void()>& checks) {
  cudaStream_t on = memory_.side.get();  // until the caller's is known to be of this device
  const auto refuse = [&](ErrorCode code) {
    std::byte* spare = gpu_local_layout(dims_).spare_plan.in(memory_.local.data());
    const StreamOrder::Turn turn(memory_.calls->order, on);
    gpu::refuse_call(view_, spare, kind, code, on);
  };
  try {
    memory_.check_device(stream);
    on = stream;
    memory_.check_fork(stream);
    checks();
  } catch (const Error& error) {
    refuse(error.code());
    throw;
  } catch (...) {
    refuse(ErrorCode::internal);
    throw;
  }
}

void CudaBackend::enqueue(cudaStream_t stream, const std::function<void()>& launches) {
  const StreamOrder::Turn turn(memory_.calls->order, stream);
  try {
    launches();
  } catch (const std::exception& error) {
    if (is_capturing(stream)) throw;  // what was captured is not going to run
    const auto* known = dynamic_cast<const Error*>(&error);
    memory_.given_up =
        Error(known != nullptr ? known->code() : ErrorCode::internal,
              "rank " + std::to_string(view_.rank) + " could not enqueue a call: " + error.what());
    try {
      gpu::give_up(view_, stream);
    } catch (const Error&) {
      // The device is lost: peers learn of it from the host group, or by their deadline.
    }
    throw;
  }
}

/// Waits for the stream and for all calls; meanwhile, from time to time, looks whether the peers
/// are still there. Where one has gone, kernels that wait for it are told to give up. Returns what
/// is known about it.
std::optional<Error> CudaBackend::wait_for(cudaStream_t stream) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kBusy{2};
  constexpr std::chrono::milliseconds kBetweenLooks{50};
  std::optional<Error> departure;
  const Clock::time_point start = Clock::now();
  Clock::time_point next_look = start + kBetweenLooks;
  for (;;) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status != cudaErrorNotReady) {
      cuda::check(status, "MoeLayer::check");
      if (memory_.calls->order.is_done()) return departure;
    }
    const Clock::time_point now = Clock::now();
    if (now - start > kBusy) std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (departure || now < next_look) continue;
    next_look = now + kBetweenLooks;
    try {
      workspace_.communicator.throw_if_peer_left();
    } catch (const Error& error) {
      departure = error;
      *const_cast<volatile std::uint32_t*>(memory_.calls->stop.get()) = 1;
    }
  }
}

void CudaBackend::check(Stream stream_handle) {
  const cudaStream_t stream = to_cuda(stream_handle);
  const CurrentDevice current(memory_.device);
  if (is_capturing(stream)) {
    throw Error(ErrorCode::invalid_argument,
                "MoeLayer::check within a stream capture: it waits for the stream");
  }
  if (hosts_ != nullptr) return check_hosts(stream);
  const std::optional<Error> departure = wait_for(stream);
  if (memory_.given_up) throw Error(*memory_.given_up);
  device::FailureRecord& record = *memory_.failure.get();
  if (record.is_set == 0) return;
  const Error error = gpu::to_error(record);
  if (!device::is_fatal(record.code)) record = {};
  if (departure && record.code == device::FailureCode::peer_failed) {
    throw Error(departure->code(), std::string(error.what()) + ": " + departure->what());
  }
  throw error;
}

}  // namespace megamoe::cuda
