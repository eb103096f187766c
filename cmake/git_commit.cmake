# Writes OUTPUT, a header with the commit that SOURCE_DIR is built from: 12 hex digits, "-dirty"
# when tracked files differ from it, "unknown" outside a git checkout. Run at each build, so that it
# is never out of date; the file changes only when the commit does.
execute_process(
  COMMAND git -C ${SOURCE_DIR} describe --always --dirty --abbrev=12 --exclude=*
  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  set(commit "unknown")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#pragma once\n#define MEGAMOE_GIT_COMMIT \"${commit}\"\n")
