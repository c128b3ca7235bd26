#include "muster/group/backends/mpi.h"

#include <utility>

#include "muster/backends/mpi/communicator.h"
#include "muster/backends/mpi/loader.h"
#include "muster/backends/ucc/communicator.h"
#include "muster/backends/ucc/library.h"
#include "muster/group/backends/native.h"
#include "muster/group/errors.h"

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

}  // namespace

OwnBackend mpi_backend() {
  return {.name = Backend::MPI,
          .usable = [] { return mpi::load().status(); },
          .devices = &devices,
          .make =
              [](OwnBackendOptions options) {
                return make<&mpi::create>(Backend::MPI, std::move(options));
              }};
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

}  // namespace muster::group
