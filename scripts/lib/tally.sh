# shellcheck shell=bash
# Sums of passed, failed and skipped tests over the stages of scripts/test. Source say.sh first.

tally_passed=0
tally_failed=0
tally_skipped=0

# tally PASSED FAILED SKIPPED
tally() {
  tally_passed=$((tally_passed + $1))
  tally_failed=$((tally_failed + $2))
  tally_skipped=$((tally_skipped + $3))
}

# junit_counts FILE: prints "passed failed skipped" of the file that ctest or pytest wrote.
junit_counts() {
  local tests failures errors disabled skipped failed
  tests=$(junit_attribute "$1" tests)
  failures=$(junit_attribute "$1" failures)
  errors=$(junit_attribute "$1" errors)
  disabled=$(junit_attribute "$1" disabled)
  skipped=$(junit_attribute "$1" skipped)
  failed=$((failures + errors))
  skipped=$((disabled + skipped))
  printf '%d %d %d\n' $((tests - failed - skipped)) "$failed" "$skipped"
}

# junit_attribute FILE NAME: the attribute of the <testsuite> element, which comes first.
junit_attribute() {
  grep -m1 -oP "^\s*$2=\"\K[0-9]+" "$1" || grep -m1 -oP "<testsuite[^>]*\s$2=\"\K[0-9]+" "$1" || echo 0
}
