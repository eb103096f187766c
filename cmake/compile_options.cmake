# megamoe_options: what every target of the project compiles with; never exported to users.
add_library(megamoe_options INTERFACE)
target_compile_options(megamoe_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow>
  # The bits of a result are a contract: no contraction that the source does not spell as fma.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
  # Nobody reads errno after expf: without it, an activation and its gradient can share one call.
  $<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno>)
if(MEGAMOE_WERROR)
  target_compile_options(megamoe_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(MEGAMOE_SANITIZE)
  # Applied globally: the whole program, tests included, must carry the same instrumentation.
  add_compile_options(-fsanitize=${MEGAMOE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${MEGAMOE_SANITIZE})
endif()
# For tests and command lines: their code is long and runs once, and instrumented it takes four times as long to compile
# with -O1 as without.
add_library(megamoe_unoptimised_if_sanitized INTERFACE)
if(MEGAMOE_SANITIZE)
  target_compile_options(megamoe_unoptimised_if_sanitized INTERFACE -O0)
endif()
if(MEGAMOE_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "MEGAMOE_FUZZ needs clang: configure with -DCMAKE_CXX_COMPILER=clang++")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)  # coverage, which guides the fuzzer
endif()
