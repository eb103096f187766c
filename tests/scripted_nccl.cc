// The library that scripted_nccl.h speaks of.
#include "scripted_nccl.h"

#include <cstdlib>

namespace {

megamoe::scripted::Nccl nccl;

megamoe::scripted::Rank& rank_of(ncclComm_t comm) {
  return *reinterpret_cast<megamoe::scripted::Rank*>(comm);
}

}  // namespace

extern "C" {

megamoe::scripted::Nccl* scripted_nccl() { return &nccl; }

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION(2, 28, 9);
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t /*result*/) { return "an error of the script"; }
const char* ncclGetLastError(ncclComm_t /*comm*/) { return "its last words"; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* /*id*/) { return ncclSuccess; }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int /*num_ranks*/, ncclUniqueId /*id*/,
                                    int rank, ncclConfig_t* config) {
  if (config->blocking != 0) std::abort();  // it could hang
  *comm = reinterpret_cast<ncclComm_t>(&nccl.ranks[rank]);
  ++nccl.ranks[rank].num_made;
  return nccl.ranks[rank].state;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  *state = rank_of(comm).state;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return rank_of(comm).state; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  ++rank_of(comm).num_destroyed;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  ++rank_of(comm).num_aborted;
  nccl.num_allocations_at_abort = nccl.num_allocations.load();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
  return rank_of(comm).sending;
}
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
  return rank_of(comm).sending;
}

ncclResult_t ncclMemAlloc(void** memory, size_t bytes) {
  ++nccl.num_allocations;
  *memory = std::malloc(bytes);
  return ncclSuccess;
}
ncclResult_t ncclMemFree(void* memory) {
  --nccl.num_allocations;
  std::free(memory);
  return ncclSuccess;
}
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t, ncclWindow_t* window,
                                    int) {
  megamoe::scripted::Rank& rank = rank_of(comm);
  if (rank.registering != ncclSuccess) return rank.registering;
  if (rank.registers_for_ever) {
    rank.state = ncclInProgress;
    return ncclSuccess;  // as NCCL does, which goes on beside the caller
  }
  *window = reinterpret_cast<ncclWindow_t>(memory);
  ++rank.num_windows;
  return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t) {
  --rank_of(comm).num_windows;
  return ncclSuccess;
}
}
