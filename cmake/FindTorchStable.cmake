# Finds the headers and libraries of the torch that Python3_EXECUTABLE imports: enough for LibTorch's stable ABI, and without
# the full CUDA toolkit that find_package(Torch) asks for beside a CUDA torch.
#
#   TorchStable::torch          headers and libraries
#   TorchStable_VERSION         the Python package's, such as 2.13.0+cpu
#   TorchStable_LIBRARY_DIR     where its libraries lie
find_package(Python3 QUIET COMPONENTS Interpreter)

if(Python3_EXECUTABLE AND NOT TorchStable_ROOT_DIR)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c "import os, torch; print(os.path.dirname(torch.__file__), torch.__version__, sep=';', end='')"
    OUTPUT_VARIABLE answer ERROR_VARIABLE complaint RESULT_VARIABLE status)
  if(status EQUAL 0)
    list(GET answer 0 TorchStable_ROOT_DIR)
    list(GET answer 1 TorchStable_VERSION)
  else()
    set(TorchStable_NOT_FOUND_MESSAGE "${Python3_EXECUTABLE} cannot import torch (set Python3_EXECUTABLE): ${complaint}")
  endif()
endif()

set(TorchStable_LIBRARY_DIR "${TorchStable_ROOT_DIR}/lib")
find_path(TorchStable_INCLUDE_DIR torch/csrc/stable/library.h PATHS "${TorchStable_ROOT_DIR}/include" NO_DEFAULT_PATH)
set(libraries)
foreach(name IN ITEMS torch torch_cpu c10)
  find_library(TorchStable_${name}_LIBRARY ${name} PATHS "${TorchStable_LIBRARY_DIR}" NO_DEFAULT_PATH)
  list(APPEND libraries "${TorchStable_${name}_LIBRARY}")
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchStable
  REQUIRED_VARS TorchStable_INCLUDE_DIR TorchStable_torch_LIBRARY TorchStable_torch_cpu_LIBRARY TorchStable_c10_LIBRARY
  VERSION_VAR TorchStable_VERSION
  REASON_FAILURE_MESSAGE "${TorchStable_NOT_FOUND_MESSAGE}")

if(TorchStable_FOUND AND NOT TARGET TorchStable::torch)
  add_library(TorchStable::torch INTERFACE IMPORTED)
  target_include_directories(TorchStable::torch INTERFACE "${TorchStable_INCLUDE_DIR}")
  target_link_libraries(TorchStable::torch INTERFACE ${libraries})
endif()
