#include "common/build_info.h"

#include "git_commit.h"

namespace megamoe::tools {

BuildInfo build_info() {
#if defined(__clang__)
  const std::string compiler = "clang++ " __clang_version__;
#else
  const std::string compiler = "g++ " __VERSION__;
#endif
  return {MEGAMOE_VERSION, MEGAMOE_GIT_COMMIT, compiler, MEGAMOE_BUILD_TYPE};
}

}  // namespace megamoe::tools
