# SPDX-License-Identifier: BSD-3-Clause
# muster_torch_layer() and muster_torch_executable(): folders and programs that use LibTorch
# tensors.
#
# A file that includes torch/torch.h compiles for 13 s, one with torch/types.h (tensors and their
# operations) for 6 s. One precompiled torch/types.h, made once and shared by the torch layers,
# their tests and the examples, brings that to 2 s. Precompiling all of torch/torch.h would cost
# every file 5 s again: include the few torch/nn and torch/optim headers that a program uses.
include_guard(GLOBAL)

find_package(Libtorch REQUIRED)
message(STATUS "LibTorch ${Libtorch_VERSION} in ${Libtorch_ROOT}")

file(WRITE ${PROJECT_BINARY_DIR}/cmake/torch_headers.cc
    "// The precompiled headers need a target to belong to.\n")
function(muster_torch_headers target)
  add_library(${target} OBJECT ${PROJECT_BINARY_DIR}/cmake/torch_headers.cc)
  target_link_libraries(${target} PRIVATE muster_flags Libtorch::Libtorch)
  target_precompile_headers(${target} PRIVATE <torch/types.h>)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC ${ARGN})
  muster_sum_headers(${target} ${Libtorch_VERSION} ${GTest_VERSION})
endfunction()
muster_torch_headers(muster_torch_headers)
if(MUSTER_TESTS AND NOT MUSTER_SANITIZE)
  muster_torch_headers(muster_torch_test_headers ${MUSTER_LIGHT_OPTIONS})
  target_link_libraries(muster_torch_test_headers PRIVATE GTest::gtest)
  target_precompile_headers(muster_torch_test_headers PRIVATE <gtest/gtest.h>)
endif()

# A precompiled header is only taken by a compilation with the same options. CMake gives libraries
# -fPIC and programs -fPIE; one spelling for all of them keeps the header usable.
function(muster_use_torch_headers target)
  if(NOT TARGET ${target})
    return()
  endif()
  get_target_property(kind ${target} TYPE)
  if(kind STREQUAL "INTERFACE_LIBRARY")
    return()
  endif()
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
  get_target_property(light ${target} MUSTER_LIGHT)
  if(light)
    target_precompile_headers(${target} REUSE_FROM muster_torch_test_headers)
  else()
    target_precompile_headers(${target} REUSE_FROM muster_torch_headers)
  endif()
  if(MUSTER_SANITIZE)
    # Between the calls that a sanitizer adds, g++ 12 takes short std::strings inside of torch's for
    # overruns (GCC bug 105329).
    target_compile_options(${target} PRIVATE
        $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds;-Wno-stringop-overflow>)
  endif()
endfunction()

# muster_torch_layer(NAME [DEPENDS layer...] [LIBRARIES target...] [TEST_LIBRARIES target...])
# muster_layer() with LibTorch and the precompiled header.
function(muster_torch_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "DEPENDS;LIBRARIES;TEST_LIBRARIES")
  set(MUSTER_LAYER_EXPORT muster)
  muster_layer(${name} DEPENDS ${arg_DEPENDS} LIBRARIES ${arg_LIBRARIES} Libtorch::Libtorch
      TEST_LIBRARIES ${arg_TEST_LIBRARIES})
  muster_use_torch_headers(muster_${name})
endfunction()

# Where installed programs find the LibTorch that they were linked with: said by hand, since CMake
# leaves out what is below the source tree, as .venv is. Those of a wheel look in the environment
# that it is installed into first.
set(MUSTER_TORCH_RPATH ${Libtorch_ROOT}/lib)
if(SKBUILD AND Libtorch_ROOT MATCHES "/(lib[^/]*/python[0-9.]+/(site|dist)-packages/torch)$")
  list(PREPEND MUSTER_TORCH_RPATH "\$ORIGIN/../${CMAKE_MATCH_1}/lib")
endif()

# muster_torch_executable(NAME [FAST] SOURCES file... [LIBRARIES target...])
# A program (an example, a benchmark) on tensors; lands in bin/ of the build folder. What takes time
# in it is torch and muster, so it is itself compiled as tests are, soon, unless it is to be FAST:
# what times microseconds.
function(muster_torch_executable target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "FAST" "" "SOURCES;LIBRARIES")
  add_executable(${target} ${arg_SOURCES})
  # What registers itself is there in every program, as in those that link an installed muster.
  target_link_libraries(${target} PRIVATE ${arg_LIBRARIES} Libtorch::Libtorch
      $<TARGET_NAME_IF_EXISTS:muster_wing_backends> $<TARGET_NAME_IF_EXISTS:muster_spawn>)
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin
      INSTALL_RPATH "${MUSTER_TORCH_RPATH}")
  muster_join_sources(${target})
  if(NOT arg_FAST AND TARGET muster_torch_test_headers)
    set_target_properties(${target} PROPERTIES MUSTER_LIGHT ON)
    target_compile_options(${target} PRIVATE ${MUSTER_LIGHT_OPTIONS})
    # as the header has it
    target_compile_options(${target} PRIVATE
        $<TARGET_PROPERTY:GTest::gtest,INTERFACE_COMPILE_OPTIONS>)
  endif()
  muster_use_torch_headers(${target})
endfunction()
