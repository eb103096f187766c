# shellcheck shell=bash
# Configuring, building and testing a preset. Functions only.

# configure PRESET [cmake arguments...]
configure() {
  local preset=$1
  shift
  # A compiler cache shortens later builds; nothing depends on it.
  if command -v ccache >/dev/null; then set -- "$@" -DCMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
  cmake --preset "$preset" "$@"
}

# build PRESET JOBS [cmake --build arguments...]
build() {
  local preset=$1 jobs=$2
  shift 2
  cmake --build --preset "$preset" -j "$jobs" "$@"
}

# run_tests PRESET JOBS JUNIT_FILE [ctest arguments...]
run_tests() {
  local preset=$1 jobs=$2 junit=$3
  shift 3
  ctest --preset "$preset" -j "$jobs" --no-tests=error --output-junit "$PWD/$junit" "$@"
}
