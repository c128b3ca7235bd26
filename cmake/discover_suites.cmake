# SPDX-License-Identifier: BSD-3-Clause
# Read by ctest when it starts: a test for each suite of the GoogleTest `program`, named `prefix`
# and the suite, with `properties`.
if(NOT EXISTS ${program})
  add_test(${prefix}NOT_BUILT ${program})
  return()
endif()
execute_process(COMMAND ${program} --gtest_list_tests OUTPUT_VARIABLE listed RESULT_VARIABLE result
    ERROR_QUIET)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "${program} --gtest_list_tests ended with ${result}")
endif()
string(REGEX MATCHALL "(^|\n)[^ \n]+\\." suites "${listed}")
list(TRANSFORM suites STRIP)
list(REMOVE_DUPLICATES suites)
foreach(suite IN LISTS suites)
  string(REGEX REPLACE "\\.$" "" name "${suite}")
  add_test("${prefix}${name}" ${timed} ${program} "--gtest_filter=${suite}*")
  set_tests_properties("${prefix}${name}" PROPERTIES ${properties})
endforeach()
