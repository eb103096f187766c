// Measuring only.
#pragma once
#include <cstdio>
#include <cstdlib>

namespace megamoe {
struct Variant {
  int first_both = 0;     // clusters of four beside dx
  int rest_both = 0;      // and after it
  int jobs = 1;           // beside dx
  int sms = 54;
  int first_brought = 2;
  int rest_brought = 2;
  int dx_on_side = 0;
  // what describe() sees
  int brought_in = 2;
  bool current_both = false;
};
inline Variant parse_variant(const char* text) {
  Variant v;
  std::sscanf(text, "%d %d %d %d %d %d %d", &v.first_both, &v.rest_both, &v.jobs, &v.sms,
              &v.first_brought, &v.rest_brought, &v.dx_on_side);
  v.brought_in = v.rest_brought;
  v.current_both = v.rest_both != 0;
  return v;
}
inline Variant& variant() {
  static const Variant initial =
      std::getenv("FP_VARIANT") ? parse_variant(std::getenv("FP_VARIANT")) : Variant{};
  thread_local Variant now = initial;
  return now;
}
}  // namespace megamoe
