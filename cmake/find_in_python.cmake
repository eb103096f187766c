# find_in_python(RESULT FILE): the folder among those of the interpreter's packages that holds FILE, or "". An isolated build
# (`pip install .`) hides the environment's packages, but not its folders.
function(find_in_python result file)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  set(folder "")
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "
import pathlib, sys, sysconfig
folders = [pathlib.Path(name) for name in (sysconfig.get_paths()['platlib'], sysconfig.get_paths()['purelib'], *sys.path) if name]
print(next((folder for folder in folders if (folder / '${file}').exists()), ''))
" OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()
