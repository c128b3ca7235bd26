# SPDX-License-Identifier: BSD-3-Clause
# cmake -DBUILD=<build folder> -DSOURCE=<source tree> -DPROJECT=<the project that uses muster>
# -DWORK=<empty folder> -DCXX=<compiler> [-DPYTHON=<that has torch>] -P install_test.cmake
function(step)
  string(JOIN " " line ${ARGN})
  message(STATUS "${line}")
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed with ${result}: ${line}")
  endif()
endfunction()

# What is installed may be moved as a whole: all that follows sees it only where it is then.
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
set(prefix "${WORK}/moved elsewhere")
file(RENAME ${WORK}/prefix "${prefix}")
foreach(wanted IN ITEMS bin/muster include/muster/distributed.h)
  if(NOT EXISTS "${prefix}/${wanted}")
    message(FATAL_ERROR "${wanted} was not installed")
  endif()
endforeach()
file(GLOB_RECURSE installed RELATIVE "${prefix}/include" "${prefix}/include/muster/*")
file(GLOB_RECURSE public RELATIVE ${SOURCE}/include ${SOURCE}/include/muster/*)
if(NOT installed STREQUAL public)
  message(FATAL_ERROR
      "installed headers: ${installed}\npublic headers: ${public}\ncmake/MusterInstall.cmake lists \
them")
endif()
step(python3 ${SOURCE}/tools/check_public_headers "${prefix}/include")

# Each of the command's programs starts: it finds LibTorch, and not by way of the build folder.
unset(ENV{LD_LIBRARY_PATH})
set(muster "${prefix}/bin/muster")
file(GLOB programs "${prefix}/bin/*")
set(expected "${prefix}/bin/muster" "${prefix}/bin/muster_bench_worker")
if(NOT programs STREQUAL expected)
  message(FATAL_ERROR "installed programs: ${programs}\nexpected: ${expected}")
endif()
foreach(program IN LISTS programs)
  file(READ_ELF "${program}" RPATH rpath RUNPATH runpath CAPTURE_ERROR error)
  string(FIND "${rpath};${runpath}" "${BUILD}" at)
  if(error OR NOT at EQUAL -1)
    message(FATAL_ERROR
        "${program} looks for its libraries in the build folder: ${rpath};${runpath} ${error}")
  endif()
endforeach()
execute_process(COMMAND ${muster} bench --seconds 0.01 --sizes 8 RESULT_VARIABLE result
    OUTPUT_VARIABLE table ERROR_VARIABLE complaints)
if(NOT result EQUAL 0 OR NOT table MATCHES "all_reduce" OR complaints MATCHES "engine alone")
  message(FATAL_ERROR "muster bench: ${result}\n${table}${complaints}")
endif()

step(${CMAKE_COMMAND} -S ${PROJECT} -B ${WORK}/build -G Ninja "-DCMAKE_PREFIX_PATH=${prefix}"
    -DCMAKE_CXX_COMPILER=${CXX}
     -DCMAKE_BUILD_TYPE=Release)
step(${CMAKE_COMMAND} --build ${WORK}/build)
step(${WORK}/build/core_only)
step(${WORK}/build/umbrellas)

# The tutorial's program is such a project too: it trains, is killed and goes on.
file(COPY ${SOURCE}/examples/data/digits.csv DESTINATION ${WORK}/tutorial)
step(${CMAKE_COMMAND} -E env "CMAKE_PREFIX_PATH=${prefix}" CXX=${CXX} CMAKE_GENERATOR=Ninja
    "PATH=${prefix}/bin:$ENV{PATH}" OMP_NUM_THREADS=1 python3 -B ${SOURCE}/tests/python/pages.py
     ${SOURCE}/docs/user/tutorial-cpp.md ${WORK}/tutorial)
