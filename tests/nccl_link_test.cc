// What joins hosts by NCCL while it forms: an NCCL whose communicators never do stands in for that
// of ranks that wait for each other. Needs no device: of CUDA it takes what this file defines.
#include "comm/cuda/nccl_link.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <string>

#include "megamoe/error.h"

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int /*device*/) { return cudaSuccess; }
cudaError_t cudaHostRegister(void* /*memory*/, size_t /*bytes*/, unsigned /*flags*/) {
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* /*memory*/) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t /*error*/) { return "an error of the stand-in"; }

// Not asked for while a communicator forms.
cudaError_t cudaMalloc(void**, size_t) { return cudaErrorUnknown; }
cudaError_t cudaFree(void*) { return cudaErrorUnknown; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned) { return cudaErrorUnknown; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaErrorUnknown; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaErrorUnknown; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaErrorUnknown; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaErrorUnknown; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaErrorUnknown; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaErrorUnknown; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaErrorUnknown; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaErrorUnknown; }
}

namespace megamoe::nccl {
namespace {

/// What the first rank of two hosts throws. `has_left`: its peer.
Error error_of_forming(std::uint32_t has_left, double deadline_s) {
  setenv("MEGAMOE_NCCL_LIBRARY", MEGAMOE_FORMING_NCCL, 1);
  const std::uint32_t has_left_R[] = {0, has_left};
  try {
    const NcclLink link({}, even_topology(2, 1), /*rank=*/0, /*max_ctas=*/8, has_left_R,
                        deadline_s);
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::internal, "it has formed"};
}

TEST(NcclLink, APeerThatLeavesWhileItFormsIsNamedAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const Error error = error_of_forming(1, 20.0);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(error.code(), ErrorCode::peer_failed) << error.what();
  EXPECT_NE(std::string(error.what()).find("of rank 1 by network, which left"), std::string::npos)
      << error.what();
}

TEST(NcclLink, APeerThatDoesNotComeIsNamedAtTheDeadline) {
  const Error error = error_of_forming(0, 0.5);
  EXPECT_EQ(error.code(), ErrorCode::deadline_exceeded) << error.what();
  EXPECT_NE(std::string(error.what()).find("rank 0 and rank 1 by network"), std::string::npos)
      << error.what();
}

}  // namespace
}  // namespace megamoe::nccl
