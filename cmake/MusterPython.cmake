# SPDX-License-Identifier: BSD-3-Clause
# The Python of the installed torch, its headers, and the package in python/. Sets
# MUSTER_PYTHON_FOUND; what is missing is said, and left out.
include_guard(GLOBAL)

set(MUSTER_PYTHON_FOUND FALSE)
if(NOT MUSTER_TORCH OR MUSTER_SANITIZE)  # a Python that is not instrumented cannot load what is
  return()
endif()
if(NOT Python_EXECUTABLE)
  # <environment>/lib/python3.x/site-packages/torch
  get_filename_component(environment "${Libtorch_ROOT}/../../../.." ABSOLUTE)
  if(EXISTS "${environment}/bin/python")
    set(Python_EXECUTABLE "${environment}/bin/python")
  endif()
endif()
find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
# What is missing ends the build of a wheel, which would be empty.
set(severity STATUS)
if(MUSTER_PYTHON_REQUIRED)
  set(severity FATAL_ERROR)
endif()
if(NOT Python_FOUND)
  message(${severity} "The Python package is left out: no Python with headers (python3-dev)")
elseif(NOT EXISTS "${Libtorch_ROOT}/lib/libtorch_python.so")
  message(${severity}
      "The Python package is left out: ${Libtorch_ROOT} is a libtorch without Python")
else()
  set(MUSTER_PYTHON_FOUND TRUE)
  message(STATUS "The Python package for ${Python_EXECUTABLE} goes to ${PROJECT_BINARY_DIR}/python")
  add_subdirectory(${PROJECT_SOURCE_DIR}/python ${PROJECT_BINARY_DIR}/python_package)
endif()
