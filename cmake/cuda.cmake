# The CUDA language and how kernels are compiled: sm_90a alone, ahead of time, and never with serialised wgmma or spills.
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
find_package(CUDAToolkit REQUIRED)
include(cmake/cutlass.cmake)
include(cmake/nccl.cmake)

add_library(megamoe_cuda_options INTERFACE)
target_compile_options(megamoe_cuda_options INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_90a,code=sm_90a;--expt-relaxed-constexpr;-Xptxas=-v>)
target_include_directories(megamoe_cuda_options SYSTEM INTERFACE ${MEGAMOE_CUTLASS_INCLUDE_DIR})
target_link_libraries(megamoe_cuda_options INTERFACE CUDA::cudart_static)
if(MEGAMOE_TRACE)
  target_compile_definitions(megamoe_cuda_options INTERFACE MEGAMOE_TRACE)
endif()
