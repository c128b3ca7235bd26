# SPDX-License-Identifier: BSD-3-Clause
# MUSTER_SANITIZE for all targets: the compiler's options, and how the instrumented tests are run.
#
# Sets MUSTER_TEST_ENVIRONMENT (the options of the sanitizer runtimes) and MUSTER_TEST_LAUNCHER (a
# command put in front of instrumented programs, or nothing).
include_guard(GLOBAL)

# A tuning file of the user changes no test.
set(MUSTER_TEST_ENVIRONMENT "MUSTER_TUNING=off")
set(MUSTER_TEST_LAUNCHER "")
if(NOT MUSTER_SANITIZE)
  return()
endif()

target_compile_options(muster_flags INTERFACE -fsanitize=${MUSTER_SANITIZE} -fno-omit-frame-pointer
    -g1)
target_link_options(muster_flags INTERFACE -fsanitize=${MUSTER_SANITIZE})
# g++ defines these itself; the clang of today only has __has_feature().
foreach(kind address thread)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang" AND MUSTER_SANITIZE MATCHES "${kind}")
    string(TOUPPER "__SANITIZE_${kind}__" macro)
    target_compile_options(muster_flags INTERFACE -D${macro}=1)
  endif()
endforeach()
if(MUSTER_SANITIZE MATCHES "undefined")
  # Undefined behaviour ends the test instead of printing a line that nobody reads. The check of
  # vtable pointers makes a pipe to see whether memory can be read: it cries wolf where a test uses
  # up the descriptors or closes all of them in a forked child.
  target_compile_options(muster_flags INTERFACE -fno-sanitize-recover=undefined -fno-sanitize=vptr)
  # clang's check of what a function pointer points to, which g++ has not, ends clang 14 itself
  # ("difference across sections").
  target_compile_options(muster_flags INTERFACE $<$<CXX_COMPILER_ID:Clang>:-fno-sanitize=function>)
endif()

if(MUSTER_SANITIZE MATCHES "thread")
  # g++ warns of every fence, since this sanitizer does not see them; Asio has some. Ours stand
  # behind __SANITIZE_THREAD__.
  target_compile_options(muster_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
endif()

# Several times slower, they take a quarter of what others do, and a sample of the large matrices
# also in long runs: so many seconds of each (testing/budget.h).
list(APPEND MUSTER_TEST_ENVIRONMENT "MUSTER_TEST_SHARE=0.25" "MUSTER_TEST_LONG_BUDGET_S=30")

set(suppressions ${CMAKE_CURRENT_LIST_DIR}/suppressions)
if(MUSTER_SANITIZE MATCHES "address")
  set(asan_options "detect_stack_use_after_return=1:strict_string_checks=1")
  if(MUSTER_TORCH)
    # More memory than there is is asked for by a test: that is an answer, not the end.
    string(APPEND asan_options ":allocator_may_return_null=1")
  endif()
  list(APPEND MUSTER_TEST_ENVIRONMENT "ASAN_OPTIONS=${asan_options}")
  list(APPEND MUSTER_TEST_ENVIRONMENT
      "LSAN_OPTIONS=suppressions=${suppressions}/lsan.txt:print_suppressions=0")
endif()
if(MUSTER_SANITIZE MATCHES "undefined")
  list(APPEND MUSTER_TEST_ENVIRONMENT "UBSAN_OPTIONS=print_stacktrace=1")
endif()
if(MUSTER_SANITIZE MATCHES "thread")
  set(tsan_options "halt_on_error=1:second_deadlock_stack=1")
  if(MUSTER_TORCH)
    # A LibTorch that is not built for it: its threads' waiting for each other (OpenMP) is not
    # understood, so it gets one. More memory than there is is asked for by a test: that is an
    # answer, not the end.
    string(APPEND tsan_options
        ":allocator_may_return_null=1:suppressions=${suppressions}/tsan-torch.txt")
    list(APPEND MUSTER_TEST_ENVIRONMENT "OMP_NUM_THREADS=1" "MKL_NUM_THREADS=1")
  else()
    string(APPEND tsan_options ":suppressions=${suppressions}/tsan.txt")
  endif()
  list(APPEND MUSTER_TEST_ENVIRONMENT "TSAN_OPTIONS=${tsan_options}")
  # g++ 12's runtime gives up ("unexpected memory mapping") on kernels that spread mappings over
  # more than 28 bits; without address randomisation it runs on all of them.
  set(probe ${CMAKE_BINARY_DIR}/CMakeFiles/tsan_probe)
  file(WRITE ${probe}.cc "int main() { return 0; }\n")
  try_compile(tsan_links ${probe} ${probe}.cc COMPILE_DEFINITIONS -fsanitize=thread LINK_OPTIONS
      -fsanitize=thread COPY_FILE ${probe}.out)
  find_program(MUSTER_SETARCH setarch)
  if(tsan_links AND MUSTER_SETARCH)
    execute_process(COMMAND ${MUSTER_SETARCH} -R ${probe}.out RESULT_VARIABLE setarch_result
        OUTPUT_QUIET ERROR_QUIET)
    if(setarch_result EQUAL 0)
      set(MUSTER_TEST_LAUNCHER ${MUSTER_SETARCH} -R)
    endif()
  endif()
endif()
