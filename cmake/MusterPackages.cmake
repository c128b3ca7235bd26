# SPDX-License-Identifier: BSD-3-Clause
# Debian packages, by `make deb` (CPack):
#   muster-cli     the `muster` command, with completion and manual pages
#   libmuster-dev  headers, static libraries and CMake package of the torch-free half
# What needs torch is in the wheel: a package for it would be tied to one torch that Debian has not.
include_guard(GLOBAL)

# Files that the command writes; `cmake --install` installs them too.
set(folder ${PROJECT_BINARY_DIR}/packages)
add_custom_command(OUTPUT ${folder}/muster ${folder}/_muster ${folder}/muster.fish
    ${folder}/man1/muster.1.gz
    COMMAND ${CMAKE_COMMAND} -E rm -rf ${folder}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${folder}
    COMMAND $<TARGET_FILE:muster_cli> man-pages ${folder}/man1
    COMMAND gzip -9n -r ${folder}/man1
    COMMAND $<TARGET_FILE:muster_cli> completion zsh > ${folder}/_muster
    COMMAND $<TARGET_FILE:muster_cli> completion fish > ${folder}/muster.fish
    COMMAND $<TARGET_FILE:muster_cli> completion bash > ${folder}/muster
    DEPENDS muster_cli VERBATIM)
add_custom_target(muster_command_files ALL DEPENDS ${folder}/muster)
# All that the packages hold.
add_custom_target(muster_package_files DEPENDS muster_command_files)
get_property(layers GLOBAL PROPERTY muster_layers_of_core)
add_dependencies(muster_package_files ${layers})
install(DIRECTORY ${folder}/man1 DESTINATION share/man COMPONENT cli)
install(FILES ${folder}/muster DESTINATION share/bash-completion/completions COMPONENT cli)
install(FILES ${folder}/_muster DESTINATION share/zsh/vendor-completions COMPONENT cli)
install(FILES ${folder}/muster.fish DESTINATION share/fish/vendor_completions.d COMPONENT cli)

# Debian looks for a package's licences there.
file(READ ${PROJECT_SOURCE_DIR}/LICENSE own)
file(READ ${PROJECT_SOURCE_DIR}/THIRD_PARTY.md others)
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/cmake/copyright CONTENT "@own@\n@others@" @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cmake/copyright DESTINATION share/doc/muster-cli COMPONENT cli)
install(FILES ${PROJECT_BINARY_DIR}/cmake/copyright DESTINATION share/doc/libmuster-dev COMPONENT
    core)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME muster)
set(CPACK_PACKAGE_VENDOR "The muster authors")
set(CPACK_PACKAGE_CONTACT "The muster authors <muster@localhost>")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_SOURCE_DIR}/dist)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL cli core)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_CLI_PACKAGE_NAME muster-cli)
set(CPACK_DEBIAN_CLI_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_CLI_PACKAGE_RECOMMENDS bash-completion)
set(CPACK_COMPONENT_CLI_DESCRIPTION "Starts and watches jobs of several processes
 The muster command starts the ranks of a job on one node or several, watches
 them, restarts them, and shows what they do: run, top, trace, doctor,
 checkpoint. It is free of torch; programs bring their own.")
set(CPACK_DEBIAN_CORE_PACKAGE_NAME libmuster-dev)
set(CPACK_DEBIAN_CORE_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_CORE_PACKAGE_DEPENDS
    "libsodium-dev, libssl-dev, libcurl4-openssl-dev, libspdlog-dev, pkg-config")
set(CPACK_COMPONENT_CORE_DESCRIPTION "Stores and schedules of pipelines for C++ programs
 Headers, static libraries and CMake package of muster's torch-free half:
 find_package(muster COMPONENTS core). The half that needs torch is in the
 wheel muster-dist.")
include(CPack)
