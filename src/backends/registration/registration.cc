// SPDX-License-Identifier: BSD-3-Clause
// Makes backends mpi and ucc known to programs that link this layer: communicators of backends/mpi
// and backends/ucc, used as muster's own are.
#include <utility>

#include "backends/mpi/communicator.h"
#include "backends/mpi/loader.h"
#include "backends/mpi/rendezvous.h"
#include "backends/ucc/communicator.h"
#include "backends/ucc/library.h"
#include "core/group/backends/native.h"
#include "core/group/creation/backend_registry.h"
#include "core/group/errors.h"

namespace muster::group {
namespace {

std::vector<c10::DeviceType> devices() {
  std::vector types{c10::DeviceType::CPU, c10::DeviceType::CUDA};
  if (accelerator_type() != c10::DeviceType::CUDA) types.push_back(accelerator_type());
  return types;
}

/// `create`: makes the communicator, as `mpi::create` does.
template <auto create>
std::shared_ptr<ProcessGroupBackend> make(const Backend& name, OwnBackendOptions options) {
  return std::make_shared<NativeBackend>(
      name,
      take(create(std::move(options.fabric), std::move(options.members), options.communicator)),
      options.ranks);
}

OwnBackend mpi_backend() {
  return {.name = Backend::MPI,
          .usable = [] { return mpi::load().status(); },
          .devices = &devices,
          .make =
              [](OwnBackendOptions options) {
                return make<&mpi::create>(Backend::MPI, std::move(options));
              },
          .own_job = &mpi::rendezvous_of_world};
}

OwnBackend ucc_backend() {
  return {.name = Backend::UCC,
          .usable = [] { return ucc::UccLibrary::of_process().status(); },
          .devices = &devices,
          .make =
              [](OwnBackendOptions options) {
                return make<&ucc::create>(Backend::UCC, std::move(options));
              }};
}

}  // namespace
}  // namespace muster::group

/// The linker takes this file because the layer's link options name this symbol.
extern "C" const bool muster_mpi_and_ucc_registration;
extern "C" const bool muster_mpi_and_ucc_registration = [] {
  muster::group::add_own_backend(muster::group::mpi_backend());
  muster::group::add_own_backend(muster::group::ucc_backend());
  return true;
}();
