// Which NCCL libraries are refused, and in what words. Needs no device: nothing is asked of NCCL
// but its version.
#include "comm/cuda/nccl_library.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "megamoe/error.h"

namespace megamoe::nccl {
namespace {

class NcclLibrary : public ::testing::Test {
 protected:
  void TearDown() override { unsetenv("MEGAMOE_NCCL_LIBRARY"); }

  /// The library must be refused, twice: the first refusal may not leave anything behind.
  static void expect_refusal(const char* file, std::vector<std::string> texts) {
    setenv("MEGAMOE_NCCL_LIBRARY", file, 1);
    texts.emplace_back("ranks on several devices need NCCL 2.28.9 or newer");
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        library();
        ADD_FAILURE() << file << " was taken";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
        for (const std::string& text : texts) {
          EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
              << "'" << text << "' is not in: " << error.what();
        }
      }
    }
  }
};

TEST_F(NcclLibrary, ThatIsMissingIsNamed) {
  expect_refusal("/no/such/libnccl.so", {"/no/such/libnccl.so", "nvidia-nccl-cu13"});
}

TEST_F(NcclLibrary, ThatIsTooOldIsNamedWithItsVersion) {
  expect_refusal(MEGAMOE_OLD_NCCL, {std::string(MEGAMOE_OLD_NCCL) + " is 2.28.8"});
}

TEST_F(NcclLibrary, ThatLacksAFunctionIsRefusedByItsName) {
  expect_refusal(MEGAMOE_HOLLOW_NCCL, {"the library has no ncclGetErrorString"});
}

TEST_F(NcclLibrary, ThatIsNoLibraryIsRefused) { expect_refusal("/proc/self/status", {"status"}); }

}  // namespace
}  // namespace megamoe::nccl
