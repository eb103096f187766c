# CUTLASS 4.2 headers, of which the kernels use the instruction atoms of cute/arch. Sets MEGAMOE_CUTLASS_INCLUDE_DIR, fetching the
# PyPI package into the build folder when the caller has not named a copy.
set(MEGAMOE_CUTLASS_INCLUDE_DIR "" CACHE PATH "Folder that holds cute/ and cutlass/; empty: fetched from PyPI")

if(NOT MEGAMOE_CUTLASS_INCLUDE_DIR)
  set(cutlass_folder ${PROJECT_BINARY_DIR}/cutlass)
  set(cutlass_include ${cutlass_folder}/cutlass_library/source/include)
  if(NOT EXISTS ${cutlass_include}/cute)
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -m pip download --quiet --no-deps --dest ${cutlass_folder} nvidia-cutlass==4.2.0.0
      RESULT_VARIABLE pip_status)
    if(NOT pip_status EQUAL 0)
      message(FATAL_ERROR "nvidia-cutlass==4.2.0.0 could not be fetched; name its headers in MEGAMOE_CUTLASS_INCLUDE_DIR")
    endif()
    file(GLOB cutlass_wheel ${cutlass_folder}/*.whl)
    file(ARCHIVE_EXTRACT INPUT ${cutlass_wheel} DESTINATION ${cutlass_folder}
         PATTERNS cutlass_library/source/include/*)
  endif()
  set(MEGAMOE_CUTLASS_INCLUDE_DIR ${cutlass_include})
endif()
if(NOT EXISTS ${MEGAMOE_CUTLASS_INCLUDE_DIR}/cute/arch/mma_sm90_gmma.hpp)
  message(FATAL_ERROR "MEGAMOE_CUTLASS_INCLUDE_DIR=${MEGAMOE_CUTLASS_INCLUDE_DIR} has no cute/arch/mma_sm90_gmma.hpp")
endif()
