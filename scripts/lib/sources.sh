# shellcheck shell=bash
# The tree's files by kind, NUL-separated: what git tracks, and new files that it does not ignore.

tree_files() { git ls-files -z --cached --others --exclude-standard --deduplicate -- "$@"; }

existing() {
  local file
  while IFS= read -r -d '' file; do
    if [[ -f $file ]]; then printf '%s\0' "$file"; fi
  done
}

cxx_files() { tree_files '*.h' '*.cc' '*.cuh' '*.cu' | existing; }

# Bash scripts, by their first line.
shell_files() {
  tree_files 'scripts/*' '.ci/*' 'tests/*.sh' | existing |
    xargs -0 -r grep -lZ -m1 -e '^#!/usr/bin/env bash' -e '^# shellcheck shell=bash' --
}
