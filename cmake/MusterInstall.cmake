# SPDX-License-Identifier: BSD-3-Clause
# `cmake --install`: public headers, static libraries, the `muster` command, and a CMake package
# with two components:
#   muster::core    the torch-free layers
#   muster::muster  everything, with LibTorch found by the same FindLibtorch.cmake
include_guard(GLOBAL)
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# The public headers: all that is installed of them. tests/install holds this list against the
# folder and against what the umbrellas include.
set(MUSTER_CORE_HEADERS
    clock.h
    key_value_store.h
    pipeline_table.h
    status.h)
set(MUSTER_TORCH_HEADERS
    backend.h
    backend_name.h
    checkpoint.h
    collectives.h
    comm_hook.h
    data_parallel.h
    debug.h
    debug_level.h
    device_mesh.h
    dist_autograd.h
    distributed.h
    distributed_data_parallel.h
    distributed_optimizer.h
    distributed_sampler.h
    elastic.h
    errors.h
    fully_sharded_data_parallel.h
    functional.h
    init.h
    join.h
    local_sgd.h
    model_averaging.h
    module_wrapper.h
    objects.h
    op.h
    parallel.h
    pipeline.h
    point_to_point.h
    process_group.h
    remote_module.h
    rpc.h
    rpc_calls.h
    rpc_function.h
    rpc_future.h
    rpc_options.h
    rpc_value.h
    rref.h
    shared_memory.h
    spawn.h
    store.h
    subgroups.h
    tensor_parallel.h
    work.h
    zero_redundancy_optimizer.h)

set(MUSTER_LAYER_EXPORT core)  # muster_torch_layer() sets it to `muster`
# installed programs find what they were linked with, outside the source tree
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
set(MUSTER_PACKAGE_FOLDER ${CMAKE_INSTALL_LIBDIR}/cmake/muster)

# muster_install_layer(NAME core|muster)
function(muster_install_layer name component)
  if(name MATCHES "^(testing|lab|lab_bench|command)$")
    return()  # for muster's own tests and benchmarks, and inside the `muster` command
  endif()
  set_target_properties(muster_${name} PROPERTIES EXPORT_NAME ${name})
  install(TARGETS muster_${name} EXPORT muster-${component} ARCHIVE DESTINATION
      ${CMAKE_INSTALL_LIBDIR} COMPONENT ${component})
  set_property(GLOBAL APPEND PROPERTY muster_layers_of_${component} muster_${name})
endfunction()

# muster_install_programs(TARGET...): programs that the `muster` command starts, beside it; in the
# wheel too.
function(muster_install_programs)
  install(TARGETS ${ARGN} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  if(SKBUILD)  # `pip install .`
    install(TARGETS ${ARGN} RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)
  endif()
endfunction()

# Called once, when all layers are known.
function(muster_install_package)
  add_library(muster_core INTERFACE)
  set_target_properties(muster_core PROPERTIES EXPORT_NAME core)
  set_target_properties(muster_flags PROPERTIES EXPORT_NAME flags)
  get_property(layers GLOBAL PROPERTY muster_layers_of_core)
  target_link_libraries(muster_core INTERFACE ${layers})
  install(TARGETS muster_core muster_flags EXPORT muster-core COMPONENT core)
  install(EXPORT muster-core NAMESPACE muster:: FILE muster-core.cmake DESTINATION
      ${MUSTER_PACKAGE_FOLDER} COMPONENT core)

  if(MUSTER_TORCH)
    add_library(muster_everything INTERFACE)
    set_target_properties(muster_everything PROPERTIES EXPORT_NAME muster)
    get_property(layers GLOBAL PROPERTY muster_layers_of_muster)
    target_link_libraries(muster_everything INTERFACE ${layers} muster_core)
    install(TARGETS muster_everything EXPORT muster-muster COMPONENT muster)
    install(EXPORT muster-muster NAMESPACE muster:: FILE muster-muster.cmake DESTINATION
        ${MUSTER_PACKAGE_FOLDER} COMPONENT muster)
    install(FILES ${PROJECT_SOURCE_DIR}/cmake/FindLibtorch.cmake DESTINATION
        ${MUSTER_PACKAGE_FOLDER} COMPONENT muster)
  endif()
  if(TARGET muster_cli)
    install(TARGETS muster_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT cli)
    include(MusterPackages)
  endif()

  list(TRANSFORM MUSTER_CORE_HEADERS PREPEND ${PROJECT_SOURCE_DIR}/include/muster/)
  install(FILES ${MUSTER_CORE_HEADERS} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/muster COMPONENT
      core)
  if(MUSTER_TORCH)
    list(TRANSFORM MUSTER_TORCH_HEADERS PREPEND ${PROJECT_SOURCE_DIR}/include/muster/)
    install(FILES ${MUSTER_TORCH_HEADERS} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/muster COMPONENT
        muster)
  endif()
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/THIRD_PARTY.md DESTINATION
      ${CMAKE_INSTALL_DOCDIR} COMPONENT core)

  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/musterConfig.cmake.in
      ${PROJECT_BINARY_DIR}/cmake/musterConfig.cmake
                                INSTALL_DESTINATION ${MUSTER_PACKAGE_FOLDER})
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/musterConfigVersion.cmake
      COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/cmake/musterConfig.cmake
      ${PROJECT_BINARY_DIR}/cmake/musterConfigVersion.cmake
          DESTINATION ${MUSTER_PACKAGE_FOLDER} COMPONENT core)
endfunction()
