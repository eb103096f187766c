// Whether this is a build with a sanitizer.
#pragma once

namespace megamoe {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// How often or how large. A sanitizer looks for wrong accesses, which the first repetitions make
/// as well as the last, and takes ten times as long or more; that results hold however often they
/// are tried is shown by the other builds.
template <class T>
constexpr T less_if_sanitized(T full, T sanitized) {
  return kSanitized ? sanitized : full;
}

}  // namespace megamoe
