// The addresses at which peers' parts of a symmetric window can be loaded and stored.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <vector>

namespace megamoe::nccl {

/// Element r: where rank r's part of `window` lies in this rank's address space. All ranks of the
/// window's communicator must be in one load/store domain. On the current device; synchronises.
/// Throws Error.
std::vector<std::byte*> lsa_pointers(ncclWindow_t window, int num_ranks);

}  // namespace megamoe::nccl
