// libFuzzer's entry point: plans, argument validation and configurations (see checks.h).
//   cmake --preset fuzz && cmake --build --preset fuzz
//   build/fuzz/bin/plan_fuzz -max_len=512 -max_total_time=60 tests/fuzz/corpus
#include <cstdio>
#include <cstdlib>

#include "checks.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string wrong = megamoe::fuzz::check_input(data, size);
  if (!wrong.empty()) {
    std::fprintf(stderr, "plan_fuzz: %s\n", wrong.c_str());
    std::abort();
  }
  return 0;
}
