# SPDX-License-Identifier: BSD-3-Clause
# One target per room of src, its tests beside its code.
include_guard(GLOBAL)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# ccache where there is one. It takes precompiled headers only when told that their defines and
# times do not matter. A precompiled header holds the paths of its clone: ccache goes by the sum
# beside it instead (muster_sum_headers), so that what is compiled with it is found in every clone.
find_program(MUSTER_CCACHE ccache)
if(MUSTER_CCACHE AND (NOT CMAKE_CXX_COMPILER_LAUNCHER OR CMAKE_CXX_COMPILER_LAUNCHER STREQUAL
    "ccache"))
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
      CCACHE_PCH_EXTSUM=1 CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
      CCACHE_NOHASHDIR=1 ${MUSTER_CCACHE})
endif()

include(MusterInstall)

find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(libsodium REQUIRED IMPORTED_TARGET libsodium)
find_package(OpenSSL 3 REQUIRED)
find_package(CURL REQUIRED)
find_package(spdlog REQUIRED)

add_library(muster_flags INTERFACE)
target_include_directories(muster_flags INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
                           $<INSTALL_INTERFACE:include>)
target_compile_features(muster_flags INTERFACE cxx_std_20)
target_compile_options(muster_flags INTERFACE
    $<BUILD_INTERFACE:-Wall;-Wextra$<$<BOOL:${MUSTER_WERROR}>:;-Werror>>)
# g++ 12 takes `"text" + std::string` for an overlapping copy (GCC bug 105651).
target_compile_options(muster_flags INTERFACE
    $<BUILD_INTERFACE:$<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>>)
# Precompiled headers without the times of their sources are the same in every clone: ccache finds
# what was compiled with them.
target_compile_options(muster_flags INTERFACE
    "$<BUILD_INTERFACE:$<$<CXX_COMPILER_ID:Clang>:SHELL:-Xclang -fno-pch-timestamp>>")
# ccache understands the path in this spelling, not in CMake's own, which names the header beside
# it a second time.
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  set(CMAKE_CXX_COMPILE_OPTIONS_USE_PCH -include-pch <PCH_FILE>)
endif()
include(MusterSanitizers)

# What is tested is compiled as it is used; the tests themselves and the examples need not be fast,
# but built soon: a quarter less time with g++, and less than half of it with clang.
set(MUSTER_LIGHT_OPTIONS "")
if(NOT MUSTER_SANITIZE)
  set(MUSTER_LIGHT_OPTIONS $<$<CONFIG:Release>:$<IF:$<CXX_COMPILER_ID:GNU>,-O1,-O0>>)
elseif(MUSTER_SANITIZE MATCHES "thread")
  set(MUSTER_LIGHT_OPTIONS -O0)
endif()

# Runs every test, and writes down what it took (tools/test_report).
set(MUSTER_TIMED ${PROJECT_SOURCE_DIR}/tools/timed)

if(MUSTER_TESTS)
  enable_testing()
  include(GoogleTest)
  find_package(GTest REQUIRED)
endif()

# muster_sum_headers(TARGET VERSION...)
# Writes down what the target's precompiled header is made of: the headers' names, and the versions
# of the compiler and of the libraries that they come from. Its options are part of every command.
set(MUSTER_LIBRARY_VERSION "")
find_program(gcc NAMES g++)
if(gcc)  # clang takes libstdc++ of the newest g++
  execute_process(COMMAND ${gcc} -dumpfullversion OUTPUT_VARIABLE MUSTER_LIBRARY_VERSION
      OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
function(muster_sum_headers target)
  set(extension pch)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(extension gch)
  endif()
  file(GENERATE
      OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${target}.dir/cmake_pch.hxx.${extension}.sum
      CONTENT "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} ${MUSTER_LIBRARY_VERSION} \
${ARGN} $<TARGET_PROPERTY:${target},PRECOMPILE_HEADERS>\n")
endfunction()

# Precompiled headers for what does without torch, a quarter of its time: of all tests, and of the
# rest in the sanitized builds.
set(kinds "")
if(MUSTER_TESTS AND NOT (MUSTER_SANITIZE AND MUSTER_TORCH))
  list(APPEND kinds plain_test)
endif()
if(MUSTER_SANITIZE AND NOT MUSTER_TORCH)
  list(APPEND kinds plain)
endif()
if(kinds)
  file(WRITE ${PROJECT_BINARY_DIR}/cmake/plain_headers.cc
      "// The precompiled headers need a target to belong to.\n")
  foreach(kind ${kinds})
    add_library(muster_${kind}_headers OBJECT ${PROJECT_BINARY_DIR}/cmake/plain_headers.cc)
    target_link_libraries(muster_${kind}_headers PRIVATE muster_flags)
    target_precompile_headers(muster_${kind}_headers PRIVATE <algorithm> <array> <atomic> <chrono>
        <condition_variable> <cstdint> <cstring>
                              <deque> <functional> <map> <memory> <mutex> <optional> <random> <set>
                              <span> <sstream> <string>
                              <string_view> <thread> <unordered_map> <utility> <vector>)
    muster_sum_headers(muster_${kind}_headers ${GTest_VERSION})
    set_target_properties(muster_${kind}_headers PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(muster_${kind}_headers PRIVATE -fPIC)
  endforeach()
  if(TARGET muster_plain_test_headers)
    target_link_libraries(muster_plain_test_headers PRIVATE GTest::gtest)
    target_precompile_headers(muster_plain_test_headers PRIVATE <gtest/gtest.h>)
    target_compile_options(muster_plain_test_headers PRIVATE ${MUSTER_LIGHT_OPTIONS})
  endif()
endif()
function(muster_use_plain_headers target headers)
  if(NOT TARGET ${headers})
    return()
  endif()
  # One spelling of this option for libraries and programs keeps the header usable.
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${target} PRIVATE -fPIC)
  target_precompile_headers(${target} REUSE_FROM ${headers})
  if(MUSTER_SANITIZE)
    # Between the calls that a sanitizer adds, g++ 12 takes short std::strings of a precompiled
    # header for overruns (GCC bug 105329).
    target_compile_options(${target} PRIVATE
        $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds;-Wno-stringop-overflow>)
  endif()
endfunction()

# muster_join_sources(TARGET [COUNT])
# Compiles the target's files so many at a time: most of the time of a short one goes to the headers
# that they share. CMake's own joined files name their parts by the path of the clone; these do not,
# so that ccache finds them in every clone. A source with options of its own, or with
# SKIP_UNITY_BUILD_INCLUSION, stands alone.
function(muster_join_sources target)
  if(NOT MUSTER_JOIN_SOURCES)
    return()
  endif()
  set(count 5)
  if(ARGC GREATER 1)
    set(count ${ARGV1})
  endif()
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  # A source that is included has parts that it keeps to itself, and types made of them, as a header
  # should not.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  # When the folder's CMakeLists.txt has been read, the properties of its sources are known.
  cmake_language(EVAL CODE "cmake_language(DEFER CALL muster_write_joined ${target} ${count})")
endfunction()
function(muster_write_joined target count)
  get_target_property(sources ${target} SOURCES)
  set(kept "")
  set(joined "")
  foreach(source IN LISTS sources)
    get_source_file_property(alone ${source} SKIP_UNITY_BUILD_INCLUSION)
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    cmake_path(ABSOLUTE_PATH source OUTPUT_VARIABLE path)
    cmake_path(IS_PREFIX PROJECT_SOURCE_DIR "${path}" inside)
    if(alone OR options OR NOT inside OR NOT source MATCHES "\\.cc$")
      list(APPEND kept ${source})
    else()
      list(APPEND joined ${path})
    endif()
  endforeach()
  list(LENGTH joined left)
  if(left LESS 2)
    return()
  endif()
  set(number 0)
  while(joined)
    set(batch "")
    foreach(i RANGE 1 ${count})
      list(POP_FRONT joined path)
      list(APPEND batch ${path})
      if(NOT joined)
        break()
      endif()
    endforeach()
    set(text "")
    foreach(path IN LISTS batch)
      cmake_path(RELATIVE_PATH path BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE name)
      string(REGEX REPLACE "^src/" "" name ${name})  # as includes spell it
      string(APPEND text "#include \"${name}\"\n")
    endforeach()
    set(file ${CMAKE_CURRENT_BINARY_DIR}/joined/${target}_${number}.cc)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
    list(APPEND kept ${file})
    math(EXPR number "${number} + 1")
  endwhile()
  set_property(TARGET ${target} PROPERTY SOURCES ${kept})
endfunction()

# muster_wing_of_folder(VARIABLE): the wing that the folder of this CMakeLists.txt is of; the label
# of its tests.
function(muster_wing_of_folder variable)
  cmake_path(RELATIVE_PATH CMAKE_CURRENT_SOURCE_DIR BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/src
      OUTPUT_VARIABLE folder)
  string(REGEX REPLACE "/.*" "" wing "${folder}")
  if(wing STREQUAL "..")
    set(wing tests)  # a folder beside src
  endif()
  set(${variable} ${wing} PARENT_SCOPE)
endfunction()

# muster_wing_targets(): for each wing that is built, muster_wing_NAME, which links all of it, and
# wing_NAME, which builds it and its tests.
function(muster_wing_targets)
  foreach(wing IN LISTS MUSTER_ALL_WINGS)
    get_property(layers GLOBAL PROPERTY muster_layers_of_wing_${wing})
    if(layers)
      add_library(muster_wing_${wing} INTERFACE)
      target_link_libraries(muster_wing_${wing} INTERFACE ${layers})
      get_property(tests GLOBAL PROPERTY muster_tests_of_wing_${wing})
      add_custom_target(wing_${wing} DEPENDS ${layers} ${tests})
    endif()
  endforeach()
endfunction()

# muster_layer(NAME [TESTS_COMPUTE] [TESTS_SANITIZED] [DEPENDS layer...] [LIBRARIES target...])
# Builds every *.cc of the folder (recursively, but for plugin/) into muster_NAME, and every
# *_test.cc into muster_NAME_test. TESTS_COMPUTE: the tests spend their time in loops of their own,
# and are compiled with optimisation in every build that is to be built soon. TESTS_SANITIZED: what
# they prove does not depend on optimisation, so `make test` runs them in the sanitized builds, and
# in the others only with MUSTER_ALL_TESTS, as `make test-long` has it.
function(muster_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TESTS_COMPUTE;TESTS_SANITIZED" ""
      "DEPENDS;LIBRARIES;TEST_LIBRARIES")
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS *.cc)
  set(tests ${sources})
  list(FILTER sources EXCLUDE REGEX "_test\\.cc$|_main\\.cc$|/plugin/")
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  if(sources)
    add_library(muster_${name} STATIC ${sources})
    muster_use_plain_headers(muster_${name} muster_plain_headers)
    muster_join_sources(muster_${name})
    set(scope PUBLIC)
  else()
    add_library(muster_${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(muster::${name} ALIAS muster_${name})
  list(TRANSFORM arg_DEPENDS PREPEND muster_)
  target_link_libraries(muster_${name} ${scope} muster_flags ${arg_DEPENDS} ${arg_LIBRARIES}
      Threads::Threads)
  muster_install_layer(${name} ${MUSTER_LAYER_EXPORT})
  muster_wing_of_folder(wing)
  set_property(GLOBAL APPEND PROPERTY muster_layers_of_wing_${wing} muster_${name})
  if(MUSTER_TESTS AND tests)
    set(torch "")
    if(MUSTER_LAYER_EXPORT STREQUAL "muster")
      set(torch TORCH)
    endif()
    set(compute "")
    if(arg_TESTS_COMPUTE)
      set(compute COMPUTE)
    endif()
    set(sanitized "")
    if(arg_TESTS_SANITIZED)
      set(sanitized SANITIZED)
    endif()
    muster_test_executable(muster_${name}_test ${torch} ${compute} ${sanitized} SOURCES ${tests}
        LIBRARIES muster_${name} ${arg_TEST_LIBRARIES})
  endif()
endfunction()

# muster_discover_suites(TARGET PREFIX [property value]...)
# As gtest_discover_tests(), but one ctest test for each suite: where loading the program takes
# longer than most of its tests.
function(muster_discover_suites target prefix)
  set(included ${CMAKE_CURRENT_BINARY_DIR}/${target}_suites.cmake)
  file(GENERATE OUTPUT ${included} CONTENT
      "set(timed ${MUSTER_TIMED})\nset(program $<TARGET_FILE:${target}>)\nset(prefix ${prefix})
set(properties ${ARGN})
include(${PROJECT_SOURCE_DIR}/cmake/discover_suites.cmake)\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${included})
endfunction()

# One GoogleTest executable; each of its tests is a ctest test named "<layer>.<Suite>.<Test>"
# (behind MUSTER_TEST_PREFIX). Where it loads LibTorch, which takes half a second, a whole suite is
# one, "<layer>.<Suite>", but for the sanitized builds. SERIAL: nothing else is tested while one of
# them runs. TORCH: the sources use LibTorch tensors. COMPUTE, SANITIZED: see muster_layer(). The
# tests are listed when ctest starts, not when the program is linked: a build never runs what it
# builds.
function(muster_test_executable target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SERIAL;TORCH;COMPUTE;SANITIZED" "" "SOURCES;LIBRARIES")
  add_executable(${target} ${arg_SOURCES})
  target_link_libraries(${target} PRIVATE ${arg_LIBRARIES} GTest::gtest GTest::gtest_main)
  muster_join_sources(${target})
  if(NOT MUSTER_SANITIZE)
    set_target_properties(${target} PROPERTIES MUSTER_LIGHT ON)
  endif()
  target_compile_options(${target} PRIVATE ${MUSTER_LIGHT_OPTIONS})
  if(arg_COMPUTE AND (MUSTER_SANITIZE MATCHES "thread" OR
                      NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU"))
    target_compile_options(${target} PRIVATE -O1)  # which the precompiled headers are not made with
  elseif(arg_TORCH)
    muster_use_torch_headers(${target})
  else()
    muster_use_plain_headers(${target} muster_plain_test_headers)
  endif()
  # gtest_discover_tests would hand on the first of several variables only.
  set(launcher ${MUSTER_TIMED} env ${MUSTER_TEST_ENVIRONMENT} ${MUSTER_TEST_LAUNCHER})
  set_target_properties(${target} PROPERTIES CROSSCOMPILING_EMULATOR "${launcher}")
  if(arg_SANITIZED AND NOT MUSTER_SANITIZE AND NOT MUSTER_ALL_TESTS)
    set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  muster_wing_of_folder(wing)
  set_property(GLOBAL APPEND PROPERTY muster_tests_of_wing_${wing} ${target})
  string(REGEX REPLACE "^muster_(.*)_test$" "\\1" layer ${target})
  if(arg_TORCH AND NOT MUSTER_SANITIZE)
    muster_discover_suites(${target} "${MUSTER_TEST_PREFIX}${layer}." ENVIRONMENT
        "${MUSTER_TEST_ENVIRONMENT}" RUN_SERIAL ${arg_SERIAL} LABELS ${wing})
    return()
  endif()
  set(filter "")
  if(MUSTER_SANITIZE MATCHES "thread" AND NOT MUSTER_ALL_TESTS)
    # Of one thread each, fibers or steps in turn: there is no race to find, and some of them would
    # take minutes.
    set(filter TEST_FILTER
        "-RegionGroup.*:RegionFailure.*:Region*Model.*:LinkGroup.*:Kernels.*:Schedule.*:Proof.*:\
Cost.*:Sim*:RpcMessageFuzz.*:*Plan.*:Plans.*:Slices.*:OpTable.*:Selection.*:Tuning.*:TableTest.*:\
PipelineTable.*:AgentMachine.*:NextEpoch.*:Safetensors.*:Resharding.*:ShardsFuzz.*:Handshake.*:\
TlsSession*:*TlsRelay.*:*TlsStreams.*:*SecretTest.Dumps*:*Damaged.*")
  endif()
  gtest_discover_tests(${target} ${filter} TEST_PREFIX "${MUSTER_TEST_PREFIX}${layer}."
      DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                       PROPERTIES RUN_SERIAL ${arg_SERIAL} LABELS ${wing})
endfunction()

# muster_pytest(NAME FILE [TIMEOUT seconds] [PATH folder...] [ENVIRONMENT variable=value...])
# One ctest test that runs a file of pytest's with the built package, and with the folders of PATH,
# on PYTHONPATH. RES_OPTIONS: stock torch asks the name service about its peers, which takes 10 s a
# time if the service does not answer.
function(muster_pytest name file)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "TIMEOUT" "PATH;ENVIRONMENT")
  list(JOIN arg_PATH ":" path)
  set(start ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/forked_pytest pytest)
  if(arg_PATH)  # torch may find what it loads there when it is imported
    set(start ${MUSTER_TIMED} ${Python_EXECUTABLE} -m pytest)
  endif()
  add_test(NAME ${MUSTER_TEST_PREFIX}${name} COMMAND ${start} -v -p no:cacheprovider
      ${CMAKE_CURRENT_SOURCE_DIR}/${file})
  set_tests_properties(${MUSTER_TEST_PREFIX}${name} PROPERTIES LABELS python ENVIRONMENT
      "PYTHONPATH=${PROJECT_BINARY_DIR}/python:${path};PYTHONDONTWRITEBYTECODE=1;\
OMP_NUM_THREADS=1;RES_OPTIONS=timeout:1 attempts:1;${arg_ENVIRONMENT}")
  if(arg_TIMEOUT)
    set_tests_properties(${MUSTER_TEST_PREFIX}${name} PROPERTIES TIMEOUT ${arg_TIMEOUT})
  endif()
endfunction()
