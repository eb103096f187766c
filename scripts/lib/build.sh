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

# find_nvcc: the path of nvcc 13, on PATH or where NVIDIA's packages put it.
find_nvcc() {
  local nvcc
  for nvcc in "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc /usr/local/cuda-13*/bin/nvcc; do
    if [[ -x $nvcc ]] && "$nvcc" --version | grep -q 'release 13\.'; then
      printf '%s' "$nvcc"
      return 0
    fi
  done
  return 1
}
