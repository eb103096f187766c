# megamoe_torch: PyTorch's stable ABI, found through an interpreter (Python_EXECUTABLE).
#
# Not find_package(Torch): its package file looks for a CUDA toolkit, also where only headers are needed. An isolated
# build (`pip install .`) hides the environment's packages by PYTHONPATH, which -E makes the interpreter forget.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
set(MEGAMOE_TORCH_DIR "" CACHE PATH "Folder of the torch package; found through Python when empty")
if(NOT MEGAMOE_TORCH_DIR)
  foreach(flag IN ITEMS "-B" "-E") # -B changes nothing here
    execute_process(
      COMMAND "${Python_EXECUTABLE}" ${flag} -c "
import importlib.util, pathlib
spec = importlib.util.find_spec('torch')
folder = pathlib.Path(spec.origin).parent if spec and spec.origin else None
print(folder if folder and (folder / 'lib' / 'libtorch_cpu.so').exists() else '')
" OUTPUT_VARIABLE torch_dir OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    if(torch_dir)
      break()
    endif()
  endforeach()
else()
  set(torch_dir "${MEGAMOE_TORCH_DIR}")
endif()
if(NOT EXISTS "${torch_dir}/include/torch/csrc/stable/library.h")
  message(FATAL_ERROR "PyTorch 2.11 or newer was not found with ${Python_EXECUTABLE}. Install it there (pip install torch), "
    "or give its folder with -DMEGAMOE_TORCH_DIR=.../site-packages/torch "
    "(pip install . -C cmake.define.MEGAMOE_TORCH_DIR=...).")
endif()
message(STATUS "PyTorch: ${torch_dir}")

add_library(megamoe_torch INTERFACE)
target_include_directories(megamoe_torch SYSTEM INTERFACE "${torch_dir}/include")
# 2.11: tensors that own foreign memory (from_blob with a deleter) came into the stable ABI with it.
target_compile_definitions(megamoe_torch INTERFACE TORCH_TARGET_VERSION=0x020b000000000000)
# Found by name at run time: `import torch` has loaded it before.
target_link_libraries(megamoe_torch INTERFACE "${torch_dir}/lib/libtorch_cpu.so")
