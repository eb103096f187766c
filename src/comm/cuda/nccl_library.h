// NCCL, loaded when it is first needed: a build with CUDA runs on machines that have none.
#pragma once

#include <nccl.h>

#include <string>

namespace megamoe::nccl {

/// NCCL 2.28.9 is the first with symmetric windows that kernels can read and write.
inline constexpr int kLeastVersion = NCCL_VERSION(2, 28, 9);

/// The functions that are used.
struct Library {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetErrorString) get_error_string;
  decltype(&ncclGetLastError) get_last_error;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config;
  decltype(&ncclCommGetAsyncError) comm_get_async_error;
  decltype(&ncclCommFinalize) comm_finalize;
  decltype(&ncclCommDestroy) comm_destroy;
  decltype(&ncclCommAbort) comm_abort;
  decltype(&ncclGroupStart) group_start;
  decltype(&ncclGroupEnd) group_end;
  decltype(&ncclSend) send;
  decltype(&ncclRecv) recv;
  decltype(&ncclMemAlloc) mem_alloc;
  decltype(&ncclMemFree) mem_free;
  decltype(&ncclCommWindowRegister) window_register;
  decltype(&ncclCommWindowDeregister) window_deregister;
};

/// The library of this process, loaded at the first call: the one that is loaded already (PyTorch
/// brings one), or libnccl.so.2 of the search path. Throws Error(unsupported) where there is none
/// or it is too old; MEGAMOE_NCCL_LIBRARY names another file.
const Library& library();

/// "NCCL: ", what `result` means, and its last message, if there is one.
std::string reason_of(ncclResult_t result);
/// Throws Error naming `what` and NCCL's reason.
void check(ncclResult_t status, const std::string& what);

}  // namespace megamoe::nccl
