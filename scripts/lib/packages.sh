# shellcheck shell=bash
# Debian packages of the scripts. Source say.sh first; functions and lists only.

# The lists are read by the scripts that source this file.
# shellcheck disable=SC2034
build_packages=(g++ cmake ninja-build git libhwy-dev libcli11-dev nlohmann-json3-dev)
# shellcheck disable=SC2034
test_packages=(libgtest-dev libbenchmark-dev)
# shellcheck disable=SC2034
lint_packages=(clang-format-14 clang-tidy-14 shellcheck)
# For pip, which fetches the CUTLASS headers.
# shellcheck disable=SC2034
cuda_packages=(python3 python3-pip)

# missing_packages NAME...: prints those that are not installed.
missing_packages() {
  local package
  for package in "$@"; do
    # shellcheck disable=SC2016  # the format string is dpkg-query's
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      printf '%s\n' "$package"
  done
}

# ensure_packages NAME...: installs what is missing, as root; otherwise says what to install.
ensure_packages() {
  command -v dpkg-query >/dev/null || {
    say "packages: not a Debian system; taking the tools that are there (needed: $*)"
    return 0
  }
  local missing
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  ((EUID == 0)) || die "please install, as root: apt-get install ${missing[*]}"
  say "packages: installing ${missing[*]}"
  local log=build/logs/packages.log
  mkdir -p build/logs
  export DEBIAN_FRONTEND=noninteractive
  if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } \
    </dev/null >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    die "apt-get failed; the whole log: $log"
  fi
}
