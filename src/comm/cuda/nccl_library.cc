#include "comm/cuda/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "megamoe/error.h"

namespace megamoe::nccl {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::unsupported, "ranks on several devices need NCCL " +
                                          version_text(kLeastVersion) +
                                          " or newer (PyPI: nvidia-nccl-cu13): " + why);
}

template <class Function>
void load(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) refuse(std::string("the library has no ") + name);
}

Library open() {
  const char* named = std::getenv("MEGAMOE_NCCL_LIBRARY");
  const char* file = named != nullptr ? named : "libnccl.so.2";
  void* handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) refuse(dlerror());
  Library found{};
  load(handle, "ncclGetVersion", found.get_version);
  int version = 0;
  found.get_version(&version);
  if (version < kLeastVersion) refuse(std::string(file) + " is " + version_text(version));
  load(handle, "ncclGetErrorString", found.get_error_string);
  load(handle, "ncclGetLastError", found.get_last_error);
  load(handle, "ncclGetUniqueId", found.get_unique_id);
  load(handle, "ncclCommInitRankConfig", found.comm_init_rank_config);
  load(handle, "ncclCommGetAsyncError", found.comm_get_async_error);
  load(handle, "ncclCommFinalize", found.comm_finalize);
  load(handle, "ncclCommDestroy", found.comm_destroy);
  load(handle, "ncclCommAbort", found.comm_abort);
  load(handle, "ncclGroupStart", found.group_start);
  load(handle, "ncclGroupEnd", found.group_end);
  load(handle, "ncclSend", found.send);
  load(handle, "ncclRecv", found.recv);
  load(handle, "ncclMemAlloc", found.mem_alloc);
  load(handle, "ncclMemFree", found.mem_free);
  load(handle, "ncclCommWindowRegister", found.window_register);
  load(handle, "ncclCommWindowDeregister", found.window_deregister);
  return found;
}

}  // namespace

const Library& library() {
  static const Library loaded = open();  // after an exception the next call tries again
  return loaded;
}

std::string reason_of(ncclResult_t result) {
  const Library& nccl = library();
  const char* last = nccl.get_last_error(nullptr);
  return std::string("NCCL: ") + nccl.get_error_string(result) +
         (last != nullptr && last[0] != '\0' ? std::string(" (") + last + ")" : "");
}

void check(ncclResult_t status, const std::string& what) {
  if (status != ncclSuccess) throw Error(ErrorCode::internal, what + ": " + reason_of(status));
}

}  // namespace megamoe::nccl
