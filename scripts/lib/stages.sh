# shellcheck shell=bash
# The stages of scripts/test. Functions only. A stage succeeds, fails or returns `stage_skipped`; if
# it leaves build/logs/STAGE.xml (a JUnit file), its tests are counted, otherwise the stage
# counts as one.

stage_skipped=77
: "${jobs:?the number of parallel jobs, set by the script that sources this file}"
: "${cuda_packages[0]:?source packages.sh first}"

# run_stage NAME: runs stage_NAME with its output in the log, counts and reports it.
run_stage() {
  local stage=$1 log=build/logs/$1.log junit=build/logs/$1.xml status=0 start=$SECONDS
  local passed=0 failed=0 skipped=0
  rm -f "$junit"
  ("stage_$stage") >"$log" 2>&1 </dev/null || status=$?
  if [[ -f $junit ]]; then
    read -r passed failed skipped < <(junit_counts "$junit")
    # What ctest counts as neither (a program that could not start, say) must not look like success.
    if ((status != 0 && failed == 0)); then failed=1; fi
  elif ((status == 0)); then
    passed=1
  elif ((status == stage_skipped)); then
    skipped=1
  else
    failed=1
  fi
  tally "$passed" "$failed" "$skipped"
  say "$stage: $passed passed, $failed failed, $skipped skipped ($((SECONDS - start)) s)"
  if ((failed > 0)); then
    explain_failure "$log" "$junit"
  elif ((status == stage_skipped)); then
    tail -n 1 "$log" | sed 's/^/  /'
  fi
}

# explain_failure LOG JUNIT: the failed tests by name, or the end of the log.
explain_failure() {
  if ! { [[ -f $2 ]] && grep -oP '<testcase name="\K[^"]*(?=".*status="fail")' "$2" | sed 's/^/  failed: /'; }; then
    tail -n 40 "$1" | sed 's/^/  | /'
  fi
  say "  the whole log: $1"
}

build_and_test() {
  local preset=$1
  configure "$preset" && build "$preset" "$jobs" &&
    run_tests "$preset" "$jobs" "build/logs/$preset.xml"
}

stage_format() {
  scripts/format --check && scripts/check_docs && shell_files | xargs -0 shellcheck -x -P SCRIPTDIR -P .
}

stage_release() { build_and_test release; }

stage_tidy() {
  configure release && build release "$jobs" && scripts/tidy --jobs "$jobs"
}

stage_install() {
  local prefix=$PWD/build/install example=build/find_package
  configure release && build release "$jobs" &&
    rm -rf "$prefix" "$example" &&
    cmake --install build/release --prefix "$prefix" &&
    cmake -S examples/find_package -B "$example" -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_PREFIX_PATH="$prefix" &&
    cmake --build "$example" -j "$jobs" &&
    "$example/find_package_example"
}

stage_asan() { build_and_test asan; }

stage_tsan() { build_and_test tsan; }

# On a machine with a GPU the package has its CUDA backend, and the tests run on both.
stage_python() {
  local nvcc
  if nvcc=$(find_nvcc) && nvidia-smi -L 2>/dev/null | grep -q GPU; then
    export MEGAMOE_PYTHON_CUDA=1 CUDACXX=$nvcc
  fi
  scripts/python -m pytest tests/python -p no:cacheprovider --junitxml="$PWD/build/logs/python.xml"
}

stage_cuda() {
  local nvcc
  nvcc=$(find_nvcc) || {
    say "nvcc 13 is not installed: the CUDA backend was not built"
    return $stage_skipped
  }
  say "building with $nvcc"
  ensure_packages "${cuda_packages[@]}"
  # Of the CPU's part only what the GPU's needs: the release build has tested it.
  configure cuda -DCMAKE_CUDA_COMPILER="$nvcc" &&
    build cuda "$jobs" --target megamoe_command tests/gpu/all &&
    ctest --test-dir build/cuda/tests/gpu --output-on-failure --no-tests=error \
      --output-junit "$PWD/build/logs/cuda.xml"
}
