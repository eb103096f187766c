// What this command was built from and with.
#pragma once

#include <string>

namespace megamoe::tools {

struct BuildInfo {
  std::string version;     ///< of the library, "0.1.0"
  std::string commit;      ///< 12 hex digits; "-dirty" follows where tracked files differed from it
  std::string compiler;    ///< "g++ 12.2.0"
  std::string build_type;  ///< "Release"
};

BuildInfo build_info();

}  // namespace megamoe::tools
