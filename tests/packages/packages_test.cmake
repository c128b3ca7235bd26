# SPDX-License-Identifier: BSD-3-Clause
# cmake -DBUILD=<build folder> -DPROJECT=<a program of the torch-free half> -DWORK=<empty folder>
# -DCXX=<compiler> -P packages_test.cmake
function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE
      output)
  string(JOIN " " line ${ARGN})
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed with ${result}: ${line}\n${output}")
  endif()
  set(said "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK}/made)
step(cpack --config ${BUILD}/CPackConfig.cmake -B ${WORK}/made)
foreach(package IN ITEMS muster-cli libmuster-dev)
  file(GLOB file ${WORK}/made/${package}_*.deb)
  step(dpkg-deb --field ${file} Depends)
  message(STATUS "${package} depends on ${said}")
  set(depends_of_${package} "${said}")
  step(dpkg-deb --extract ${file} "${WORK}/${package} root")
endforeach()

# The command: with what dpkg-shlibdeps found, and nothing of torch.
set(root "${WORK}/muster-cli root/usr")
if(NOT depends_of_muster-cli MATCHES "libsodium23" OR depends_of_muster-cli MATCHES "torch")
  message(FATAL_ERROR "muster-cli depends on: ${depends_of_muster-cli}")
endif()
foreach(wanted IN ITEMS bin/muster share/bash-completion/completions/muster
        share/zsh/vendor-completions/_muster share/fish/vendor_completions.d/muster.fish
        share/man/man1/muster.1.gz share/man/man1/muster-run.1.gz share/doc/muster-cli/copyright)
  if(NOT EXISTS "${root}/${wanted}")
    message(FATAL_ERROR "muster-cli has no ${wanted}")
  endif()
endforeach()
unset(ENV{LD_LIBRARY_PATH})
step("${root}/bin/muster" run --standalone --nproc-per-node 2 sh -c "echo here")
if(NOT said MATCHES "\\[0\\] here" OR NOT said MATCHES "\\[1\\] here")
  message(FATAL_ERROR "muster run: ${said}")
endif()
step(bash -c ". '${root}/share/bash-completion/completions/muster' && complete -p muster")

# The libraries: enough for a program of the torch-free half.
set(root "${WORK}/libmuster-dev root/usr")
file(GLOB_RECURSE files "${root}/*")
foreach(file IN LISTS files)
  if(file MATCHES "FindLibtorch|muster-muster|/muster/distributed\\.h")
    message(FATAL_ERROR "libmuster-dev has something of torch's half: ${file}")
  endif()
endforeach()
file(WRITE ${WORK}/user/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(user LANGUAGES CXX)
find_package(muster REQUIRED)
add_executable(core_only ${PROJECT})
target_link_libraries(core_only PRIVATE muster::core)
")
step(${CMAKE_COMMAND} -S ${WORK}/user -B ${WORK}/user/build -DCMAKE_CXX_COMPILER=${CXX}
    "-DCMAKE_PREFIX_PATH=${root}")
step(${CMAKE_COMMAND} --build ${WORK}/user/build)
step(${WORK}/user/build/core_only)
file(REMOVE_RECURSE ${WORK})
