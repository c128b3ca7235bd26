#include "muster/group/backends/mpi.h"

#include <utility>

#include "muster/backends/mpi/communicator.h"
#include "muster/backends/mpi/loader.h"
#include "muster/group/backends/native.h"
#include "muster/group/errors.h"

namespace muster::group {
namespace {

std::vector<c10::DeviceType> devices() {
  std::vector types{c10::DeviceType::CPU, c10::DeviceType::CUDA};
  if (accelerator_type() != c10::DeviceType::CUDA) types.push_back(accelerator_type());
  return types;
}

std::shared_ptr<ProcessGroupBackend> make(OwnBackendOptions options) {
  return std::make_shared<NativeBackend>(
      Backend::MPI,
      take(
          mpi::create(std::move(options.fabric), std::move(options.members), options.communicator)),
      options.ranks);
}

}  // namespace

OwnBackend mpi_backend() {
  return {.name = Backend::MPI,
          .usable = [] { return mpi::load().status(); },
          .devices = &devices,
          .make = &make};
}

}  // namespace muster::group
