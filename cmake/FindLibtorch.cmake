# SPDX-License-Identifier: BSD-3-Clause
# Finds LibTorch: the C++ libraries inside a torch wheel, or an unpacked libtorch folder.
#
# Looked at in this order; the first that is set must work, the search does not go on behind it:
#   MUSTER_LIBTORCH (variable)         a folder with include/ and lib/: an unpacked libtorch, or
#                                      site-packages/torch
#   Python_EXECUTABLE (variable)       a Python that can import torch
#   LIBTORCH (environment)             like MUSTER_LIBTORCH
# and where none of them is set: .venv of the source tree, then python3 on the PATH.
#
# Defines the target Libtorch::Libtorch (torch_cpu and c10, their include folders, the matching
# _GLIBCXX_USE_CXX11_ABI) and the variables Libtorch_FOUND, Libtorch_VERSION, Libtorch_ROOT,
# Libtorch_CXX11_ABI.
#
# torch's own CMake package is not used: that of a CUDA wheel insists on a CUDA toolkit of the same
# version, which a program that computes on the CPU does not need. What is linked here is the CPU
# half only.

# The torch package folder of a Python, found without importing it (an import takes seconds). An
# isolated build of pip hides the packages of its environment: they are looked at all the same.
function(_libtorch_of_python python result)
  execute_process(
    COMMAND ${python} -c
    "import importlib.util, os, sysconfig; spec = importlib.util.find_spec('torch'); \
folder = os.path.join(sysconfig.get_path('platlib'), 'torch'); \
print(os.path.dirname(spec.origin) if spec else folder if os.path.isdir(folder) else '')"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()

set(_libtorch_hint "")
set(_libtorch_origin "")
if(MUSTER_LIBTORCH)
  set(_libtorch_hint "${MUSTER_LIBTORCH}")
  set(_libtorch_origin "MUSTER_LIBTORCH=${MUSTER_LIBTORCH}")
elseif(Python_EXECUTABLE)
  _libtorch_of_python("${Python_EXECUTABLE}" _libtorch_hint)
  set(_libtorch_origin "Python_EXECUTABLE=${Python_EXECUTABLE}")
elseif(NOT "$ENV{LIBTORCH}" STREQUAL "")
  set(_libtorch_hint "$ENV{LIBTORCH}")
  set(_libtorch_origin "environment variable LIBTORCH=$ENV{LIBTORCH}")
else()
  set(_libtorch_origin
      "no MUSTER_LIBTORCH, Python_EXECUTABLE or LIBTORCH given, .venv/bin/python and python3 have \
no torch")
  find_program(_libtorch_path_python python3 NO_CACHE)
  foreach(_libtorch_python IN ITEMS "${PROJECT_SOURCE_DIR}/.venv/bin/python"
      "${_libtorch_path_python}")
    if(NOT _libtorch_hint AND EXISTS "${_libtorch_python}")
      _libtorch_of_python("${_libtorch_python}" _libtorch_hint)
    endif()
  endforeach()
endif()

set(Libtorch_ROOT "")
set(Libtorch_VERSION "")
foreach(_libtorch_folder IN ITEMS "${_libtorch_hint}" "${_libtorch_hint}/libtorch")
  if(_libtorch_hint AND NOT Libtorch_ROOT AND EXISTS "${_libtorch_folder}/include/ATen/ATen.h")
    get_filename_component(Libtorch_ROOT "${_libtorch_folder}" ABSOLUTE)
  endif()
endforeach()

if(Libtorch_ROOT)
  set(Libtorch_TORCH_CPU_LIBRARY
      "${Libtorch_ROOT}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}torch_cpu${CMAKE_SHARED_LIBRARY_SUFFIX}")
  set(Libtorch_C10_LIBRARY
      "${Libtorch_ROOT}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}c10${CMAKE_SHARED_LIBRARY_SUFFIX}")
  foreach(_libtorch_header IN ITEMS torch/headeronly/version.h
      torch/csrc/api/include/torch/version.h)
    if(NOT Libtorch_VERSION AND EXISTS "${Libtorch_ROOT}/include/${_libtorch_header}")
      file(STRINGS "${Libtorch_ROOT}/include/${_libtorch_header}" _libtorch_lines REGEX
          "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
      string(REGEX REPLACE "[^;]*#define TORCH_VERSION_[A-Z]+ ([0-9]+)[^;]*" "\\1" _libtorch_numbers
          "${_libtorch_lines}")
      list(JOIN _libtorch_numbers "." Libtorch_VERSION)
    endif()
  endforeach()
  # Which std::string torch was built with shows in the names of the symbols of c10.
  set(Libtorch_CXX11_ABI 0)
  if(EXISTS "${Libtorch_C10_LIBRARY}")
    file(STRINGS "${Libtorch_C10_LIBRARY}" _libtorch_symbol REGEX "_ZN3c10.*__cxx1112basic_string"
        LIMIT_COUNT 1)
    if(_libtorch_symbol)
      set(Libtorch_CXX11_ABI 1)
    endif()
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Libtorch
  REQUIRED_VARS Libtorch_ROOT Libtorch_TORCH_CPU_LIBRARY Libtorch_C10_LIBRARY
  VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE
  "No LibTorch there (${_libtorch_origin}). Run tools/setup, or give -DMUSTER_LIBTORCH=<libtorch \
folder> or \
-DPython_EXECUTABLE=<a python with torch>. -DMUSTER_TORCH=OFF builds the part that needs no torch.")

if(Libtorch_FOUND AND NOT TARGET Libtorch::Libtorch)
  add_library(Libtorch::C10 SHARED IMPORTED)
  set_target_properties(Libtorch::C10 PROPERTIES
    IMPORTED_LOCATION "${Libtorch_C10_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES
    "${Libtorch_ROOT}/include;${Libtorch_ROOT}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=${Libtorch_CXX11_ABI}")
  add_library(Libtorch::Libtorch SHARED IMPORTED)
  set_target_properties(Libtorch::Libtorch PROPERTIES
    IMPORTED_LOCATION "${Libtorch_TORCH_CPU_LIBRARY}"
    INTERFACE_LINK_LIBRARIES Libtorch::C10)
endif()
