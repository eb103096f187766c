// How calls of the CUDA backend are refused, given up and checked.
#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "cuda/backend.h"
#include "kernels/failure.h"

namespace megamoe::cuda {

/// Sticky: only check(), which all ranks make at the same point, takes a failure away. Until then
/// every call fails, so that the ranks' calls stay paired.
void CudaBackend::throw_recorded_failure() const {
  if (memory_.given_up) throw Error(*memory_.given_up);
  const volatile device::FailureRecord* record = memory_.failure.get();
  if (record->is_set != 0) throw recorded_failure(*memory_.failure.get());
}

Error CudaBackend::recorded_failure(const device::FailureRecord& record) const {
  const Error error = gpu::to_error(record);
  if (device::is_fatal(record.code)) memory_.calls->has_failed = true;
  if (record.code != device::FailureCode::peer_failed) return error;
  return because_of_departure(error, record.peer);
}

Error CudaBackend::because_of_departure(const Error& error, int peer) const {
  const std::vector<Departure> departures = workspace_.communicator.departures();
  if (departures.empty()) return error;
  // A peer that is still there has failed because of another, of the first that left.
  auto cause = std::ranges::find(departures, peer, &Departure::rank);
  if (cause == departures.end()) cause = departures.begin();
  return {cause->error.code(), std::string(error.what()) + ": " + cause->error.what()};
}

Error CudaBackend::not_enqueued(const std::exception_ptr& thrown) const {
  ErrorCode code = ErrorCode::internal;
  std::string why = "what was thrown is no std::exception";
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    code = error.code();
    why = error.what();
  } catch (const std::exception& error) {
    why = error.what();
  } catch (...) {
  }
  return {code, "rank " + std::to_string(view_.rank) + " could not enqueue a call: " + why};
}

void CudaBackend::or_refuse(gpu::CallKind kind, cudaStream_t stream,
                            const std::function<void()>& checks) {
  cudaStream_t on = memory_.side.get();  // until the caller's is known to be of this device
  const auto refuse = [&](ErrorCode code) {
    std::byte* spare = gpu_local_layout(dims_).spare_plan.in(memory_.local.data());
    const StreamOrder::Turn turn(memory_.calls->order, on);
    CallOrder order(*memory_.calls, workspace_.communicator, config_, turn);
    const volatile device::FailureRecord* record = memory_.failure.get();
    if (memory_.given_up || (record->is_set != 0 && device::is_fatal(record->code))) {
      order.expect_nobody();
    }
    enter(order, [&](const gpu::RankView& view, gpu::EnterPart part) {
      gpu::refuse_call(view, spare, kind, code, on, part);
    });
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

void CudaBackend::enqueue(cudaStream_t stream, const std::function<void(CallOrder&)>& launches) {
  const StreamOrder::Turn turn(memory_.calls->order, stream);
  CallOrder order(*memory_.calls, workspace_.communicator, config_, turn);
  try {
    launches(order);
  } catch (...) {
    if (turn.is_captured()) throw;  // what was captured is not going to run
    memory_.given_up = not_enqueued(std::current_exception());
    try {
      gpu::give_up(view_, stream);
    } catch (const Error&) {
      // The device is lost: peers learn of it from the host group, or by their deadline.
    }
    throw;
  }
}

/// Waits for the stream and for all calls. Kernels of theirs that wait for a peer which has left
/// are ended by RankCalls::watch.
void CudaBackend::wait_for(cudaStream_t stream) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kBusy{2};
  const Clock::time_point start = Clock::now();
  for (;;) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status != cudaErrorNotReady) {
      cuda::check(status, "MoeLayer::check");
      if (memory_.calls->order.is_done()) return;
    }
    if (Clock::now() - start > kBusy) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void CudaBackend::check(Stream stream_handle) {
  const cudaStream_t stream = to_cuda(stream_handle);
  const CurrentDevice current(memory_.device);
  if (is_capturing(stream)) {
    throw Error(ErrorCode::invalid_argument,
                "MoeLayer::check within a stream capture: it waits for the stream");
  }
  wait_for(stream);
  if (hosts_ != nullptr) throw_if_over();
  if (memory_.given_up) throw Error(*memory_.given_up);
  device::FailureRecord& record = *memory_.failure.get();
  if (record.is_set == 0) return;
  const Error error = recorded_failure(record);
  if (!device::is_fatal(record.code)) record = {};
  throw error;
}

}  // namespace megamoe::cuda
