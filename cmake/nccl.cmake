# NCCL's headers (the library itself is loaded at run time). Sets MEGAMOE_NCCL_INCLUDE_DIR: beside CUDA, or from the PyPI package,
# fetched into the build folder.
find_path(MEGAMOE_NCCL_INCLUDE_DIR nccl_device.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH
          DOC "Folder that holds nccl.h and nccl_device.h of NCCL 2.28.9 or newer")
if(NOT MEGAMOE_NCCL_INCLUDE_DIR)
  set(nccl_folder ${PROJECT_BINARY_DIR}/nccl)
  if(NOT EXISTS ${nccl_folder}/nvidia/nccl/include/nccl_device.h)
    find_package(Python3 REQUIRED COMPONENTS Interpreter)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -m pip download --quiet --no-deps --dest ${nccl_folder} nvidia-nccl-cu13==2.28.9
      RESULT_VARIABLE pip_status)
    if(NOT pip_status EQUAL 0)
      message(FATAL_ERROR "nvidia-nccl-cu13==2.28.9 could not be fetched; name its headers in MEGAMOE_NCCL_INCLUDE_DIR")
    endif()
    file(GLOB nccl_wheel ${nccl_folder}/*.whl)
    file(ARCHIVE_EXTRACT INPUT ${nccl_wheel} DESTINATION ${nccl_folder} PATTERNS nvidia/nccl/include/*)
  endif()
  set(MEGAMOE_NCCL_INCLUDE_DIR ${nccl_folder}/nvidia/nccl/include CACHE PATH "" FORCE)
endif()
