// What the fuzzer checks. Every function reads an input and returns what is wrong, "" if nothing
// is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "byte_reader.h"

namespace megamoe::fuzz {

/// Counts, offsets and pull lists of a small routing against their definition.
std::string check_plan(ByteReader& input);
/// Views with odd members are refused with an Error, or are safe to use.
std::string check_arguments(ByteReader& input);
/// A configuration is refused with an Error that names a member, or has sizes that make sense.
std::string check_config(ByteReader& input);

/// The first byte chooses one of the checks above.
std::string check_input(const std::uint8_t* data, std::size_t size);

}  // namespace megamoe::fuzz
