// Replays the fuzzer's corpus, and some thousand random inputs, without a fuzzer.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "fuzz/checks.h"
#include "sanitized.h"

namespace megamoe::fuzz {
namespace {

TEST(FuzzReplay, Corpus) {
  int num_inputs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(MEGAMOE_FUZZ_CORPUS)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)),
                                  std::istreambuf_iterator<char>());
    EXPECT_EQ(check_input(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()), "")
        << entry.path();
    ++num_inputs;
  }
  EXPECT_GE(num_inputs, 20);
}

TEST(FuzzReplay, RandomInputs) {
  std::mt19937 generator(2024);
  for (int round = 0; round < less_if_sanitized(20000, 2000); ++round) {
    std::vector<std::uint8_t> bytes(generator() % 400);
    // Small bytes are the usual case in a view, large ones the faults: from few faults to many.
    const unsigned span = 1 + generator() % 256;
    std::generate(bytes.begin(), bytes.end(),
                  [&] { return static_cast<std::uint8_t>(generator() % span); });
    if (!bytes.empty()) bytes[0] = static_cast<std::uint8_t>(generator());
    EXPECT_EQ(check_input(bytes.data(), bytes.size()), "") << "round " << round;
  }
}

TEST(FuzzReplay, TheEmptyInput) { EXPECT_EQ(check_input(nullptr, 0), ""); }

}  // namespace
}  // namespace megamoe::fuzz
