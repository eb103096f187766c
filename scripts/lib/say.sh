# shellcheck shell=bash
# Messages of the scripts. Source it; it defines functions only.

say() { printf '%s\n' "$*"; }

die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Wrong usage: exit code 2, as the megamoe command does.
usage_error() {
  printf '%s: %s (see --help)\n' "$(basename "$0")" "$*" >&2
  exit 2
}

# The comment block at the top of the calling script, without its '#': the text of --help.
print_help() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
