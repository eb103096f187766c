# MEGAMOE_CUDA=AUTO: the CUDA backend where what it needs is on this machine, so that nothing is fetched and nothing fails: nvcc 13,
# CUTLASS 4's headers (MEGAMOE_CUTLASS_INCLUDE_DIR, the interpreter's package nvidia-cutlass, or a system folder), NCCL's headers
# (MEGAMOE_NCCL_INCLUDE_DIR, beside CUDA, or the interpreter's package nvidia-nccl-cu13, which PyTorch brings).
# Sets MEGAMOE_CUDA to ON or OFF, and says why.
find_program(found_nvcc NAMES nvcc HINTS /usr/local/cuda/bin NO_CACHE)
if(CMAKE_CUDA_COMPILER)
  set(found_nvcc "${CMAKE_CUDA_COMPILER}")
endif()
set(nvcc_version "")
if(found_nvcc)
  execute_process(COMMAND "${found_nvcc}" --version OUTPUT_VARIABLE nvcc_version ERROR_QUIET)
endif()

set(found_cutlass "${MEGAMOE_CUTLASS_INCLUDE_DIR}")
if(NOT found_cutlass)
  unset(found_cutlass)  # a variable that is set, if to nothing, is not searched for
  set(cutlass_header cute/arch/mma_sm90_gmma.hpp)
  find_in_python(packages cutlass_library/source/include/${cutlass_header})
  find_path(found_cutlass ${cutlass_header} HINTS "${packages}/cutlass_library/source/include" NO_CACHE)
endif()
set(cutlass_version "")
if(EXISTS "${found_cutlass}/cutlass/version.h")
  file(STRINGS "${found_cutlass}/cutlass/version.h" cutlass_version REGEX "define CUTLASS_MAJOR 4")
endif()

set(found_nccl "${MEGAMOE_NCCL_INCLUDE_DIR}")
if(NOT found_nccl AND found_nvcc)
  unset(found_nccl)
  get_filename_component(cuda_folder "${found_nvcc}" DIRECTORY)
  find_in_python(packages nvidia/nccl/include/nccl_device.h)
  find_path(found_nccl nccl_device.h
            HINTS "${cuda_folder}/../include" "${packages}/nvidia/nccl/include" NO_CACHE)
endif()

set(MEGAMOE_CUDA OFF)
if(NOT nvcc_version MATCHES "release 13\\.")
  message(STATUS "CUDA backend: left out, nvcc 13 was not found")
elseif(NOT cutlass_version)
  message(STATUS "CUDA backend: left out, the headers of CUTLASS 4 were not found (pip install nvidia-cutlass==4.2.0.0)")
elseif(NOT found_nccl)
  message(STATUS "CUDA backend: left out, nccl_device.h was not found (pip install nvidia-nccl-cu13)")
else()
  message(STATUS "CUDA backend: built with ${found_nvcc}, CUTLASS in ${found_cutlass}, NCCL in ${found_nccl}")
  set(MEGAMOE_CUDA ON)
  set(CMAKE_CUDA_COMPILER "${found_nvcc}" CACHE FILEPATH "")
  set(MEGAMOE_CUTLASS_INCLUDE_DIR "${found_cutlass}" CACHE PATH "" FORCE)
  set(MEGAMOE_NCCL_INCLUDE_DIR "${found_nccl}" CACHE PATH "" FORCE)
endif()
