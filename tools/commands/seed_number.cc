#include <charconv>
#include <cstdint>

#include "commands/commands.h"

namespace megamoe::tools {

CLI::Validator seed_number() {
  return {[](std::string& text) -> std::string {
            std::uint64_t seed = 0;
            const char* end = text.data() + text.size();
            const auto [rest, fault] = std::from_chars(text.data(), end, seed);
            if (fault == std::errc() && rest == end) return "";
            return "'" + text + "' is not a whole number from 0 to 2^64 - 1";
          },
          "", "seed"};
}

}  // namespace megamoe::tools
