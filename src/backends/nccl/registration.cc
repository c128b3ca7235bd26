// SPDX-License-Identifier: BSD-3-Clause
// Makes the backend known to programs that link this layer.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/nccl_backend.h"
#include "core/base/log/log.h"
#include "core/group/errors.h"

namespace muster::nccl {
namespace {

/// Has the group that is made of another have its options, unless it was given some.
void inherit(group::OwnBackendOptions& options, const ProcessGroupBackend& from) {
  if (options.pg_options == nullptr)
    options.pg_options = static_cast<const NcclBackend&>(from).pg_options();
}

/// Once in a process.
void warn_of_unused_variables() {
  static const bool once = [] {
    std::string names;
    for (const auto& name : Environment::unused()) names += (names.empty() ? "" : ", ") + name;
    if (!names.empty())
      log(LogLevel::warning, "the environment has " + names +
                                 ", which mean nothing to backend nccl; the page nccl-errors.md "
                                 "lists the variables that do");
    return true;
  }();
  static_cast<void>(once);
}

std::shared_ptr<NcclBackend> unconnected(group::OwnBackendOptions options) {
  auto library = group::take(NcclLibrary::of_process());
  const auto type = library->device();
  if (!c10::impl::hasDeviceGuardImpl(type) ||
      c10::impl::getDeviceGuardImpl(type)->deviceCount() == 0)
    throw DistBackendError(
        "backend 'nccl' needs a GPU, and this process sees none: is torch built with CUDA, and "
        "does CUDA_VISIBLE_DEVICES name one? Backend 'native' needs none",
        Code::unsupported);
  const auto environment = Environment::read();
  warn_of_unused_variables();
  auto settings = std::make_shared<NcclSettings>(*library, options.pg_options.get());
  auto terms = options.communicator;
  terms.terms += " links of nccl";
  terms.peer_traces = nullptr;  // which have no calls on these links
  auto links = group::take(
      collective::Communicator::create(options.fabric, options.members, std::move(terms)));
  return std::make_shared<NcclBackend>(std::move(library), std::move(settings), std::move(options),
                                       std::move(links), environment);
}

/// Connects by `opened`, or at once for the device that the options name, or else when needed.
std::shared_ptr<ProcessGroupBackend> connected(std::shared_ptr<NcclBackend> backend,
                                               std::shared_ptr<NcclCommunicator> opened,
                                               std::optional<c10::Device> device) {
  if (opened != nullptr)
    backend->adopt(std::move(opened));
  else if (device)
    backend->connect(*device);
  return backend;
}

TimePoint deadline_of(const group::OwnBackendOptions& options) {
  return deadline_after(steady_clock(), options.communicator.timeout);
}

std::shared_ptr<ProcessGroupBackend> make(group::OwnBackendOptions options) {
  const auto device = options.device_id;
  return connected(unconnected(std::move(options)), nullptr, device);
}

std::shared_ptr<ProcessGroupBackend> split(ProcessGroupBackend& parent, int part,
                                           group::OwnBackendOptions options) {
  inherit(options, parent);
  auto settings = std::make_shared<NcclSettings>(*group::take(NcclLibrary::of_process()),
                                                 options.pg_options.get());
  auto opened = static_cast<NcclBackend&>(parent).split(part, options.rank, std::move(settings),
                                                        deadline_of(options));
  if (part < 0) return nullptr;
  const auto device = options.device_id;
  return connected(unconnected(std::move(options)), std::move(opened), device);
}

std::shared_ptr<ProcessGroupBackend> shrink(ProcessGroupBackend& old,
                                            const std::vector<int>& excluded,
                                            group::OwnBackendOptions options) {
  inherit(options, old);
  const auto deadline = deadline_of(options);
  const auto device = options.device_id;
  auto survivors = unconnected(std::move(options));
  auto opened = static_cast<NcclBackend&>(old).shrink(excluded, *survivors, deadline);
  return connected(std::move(survivors), std::move(opened), device);
}

std::shared_ptr<ProcessGroupBackend> grow(ProcessGroupBackend* old,
                                          group::OwnBackendOptions options) {
  const auto deadline = deadline_of(options);
  const auto device = options.device_id;
  auto grown = unconnected(std::move(options));
  auto opened = grown->grow(static_cast<NcclBackend*>(old), deadline);
  return connected(std::move(grown), std::move(opened), device);
}

}  // namespace
}  // namespace muster::nccl

/// The linker takes this file because the layer's link options name this symbol.
extern "C" const bool muster_nccl_registration;
extern "C" const bool muster_nccl_registration = [] {
  muster::group::add_own_backend(
      {.name = muster::Backend::NCCL,
       .usable = [] { return muster::nccl::NcclLibrary::of_process().status(); },
       .devices = [] { return std::vector{(*muster::nccl::NcclLibrary::of_process())->device()}; },
       .make = &muster::nccl::make,
       .split = &muster::nccl::split,
       .shrink = &muster::nccl::shrink,
       .grow = &muster::nccl::grow});
  return true;
}();
