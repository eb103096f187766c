// An NCCL whose communicators never form: for nccl_link_test, of which it is all that is asked.
#include <nccl.h>

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION(2, 28, 9);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t /*result*/) { return "an error of the stand-in"; }
const char* ncclGetLastError(ncclComm_t /*comm*/) { return ""; }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int /*num_ranks*/, ncclUniqueId /*id*/,
                                    int /*rank*/, ncclConfig_t* /*config*/) {
  *comm = reinterpret_cast<ncclComm_t>(comm);
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t /*comm*/, ncclResult_t* state) {
  *state = ncclInProgress;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t /*comm*/) { return ncclSuccess; }

// Not asked for while a communicator forms.
ncclResult_t ncclGetUniqueId(ncclUniqueId*) { return ncclInternalError; }
ncclResult_t ncclCommInitRank(ncclComm_t*, int, ncclUniqueId, int) { return ncclInternalError; }
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclInternalError; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclInternalError; }
ncclResult_t ncclGroupStart() { return ncclInternalError; }
ncclResult_t ncclGroupEnd() { return ncclInternalError; }
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclInternalError;
}
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclInternalError;
}
ncclResult_t ncclMemAlloc(void**, size_t) { return ncclInternalError; }
ncclResult_t ncclMemFree(void*) { return ncclInternalError; }
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) {
  return ncclInternalError;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclInternalError; }
}
