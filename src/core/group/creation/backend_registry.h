// SPDX-License-Identifier: BSD-3-Clause
/// The backends that a program or a plugin library has registered. Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/collective/communicator.h"
#include "core/rendezvous/rendezvous.h"
#include "core/transport/fabric.h"
#include "muster/backend.h"
#include "muster/backend_name.h"
#include "muster/status.h"

namespace muster::group {

struct RegisteredBackend {
  std::string name;
  ExtendedBackendCreator make;
  std::vector<c10::DeviceType> devices;
};
/// Null if no backend has that lower-case name; otherwise valid for ever.
const RegisteredBackend* registered_backend(std::string_view name);
std::vector<std::string> registered_backends();
void add_backend(const std::string& name, ExtendedBackendCreator func,
                 const std::vector<std::string>& devices);

/// muster's own engine, by any of its names.
bool is_native(const Backend& backend);

/// Passed to a backend of muster's own that stands on a library, to make its part of a group.
struct OwnBackendOptions {
  std::shared_ptr<transport::Fabric> fabric;
  std::vector<int> members;  ///< in the fabric, and their names in errors, by group rank
  std::vector<int> ranks;    ///< in the default group
  int rank = -1;             ///< in the group
  Duration timeout{};        ///< of the group's calls
  /// For a communicator of the members in the fabric, which only this backend uses.
  collective::CommunicatorOptions communicator;
  std::shared_ptr<ProcessGroupOptions> pg_options;  ///< may be null
  std::optional<at::Device> device_id;  ///< of this rank's tensors; connect the members at once
};

/// A backend of muster's own that stands on a library. One whose layer stands above this one is
/// there in programs that link its layer: it adds itself before main.
struct OwnBackend {
  Backend name;
  /// Whether it can be used here: its library can be loaded. If not, the reason.
  std::function<Status()> usable;
  /// Device types of its tensors. Call after `usable` has succeeded.
  std::function<std::vector<c10::DeviceType>()> devices;
  /// Called on every member of a group.
  std::function<std::shared_ptr<ProcessGroupBackend>(OwnBackendOptions options)> make;
  /// As `make`, for the parts of a group: may use what `parent`, the group's backend, has
  /// connected. Called on every member of the parent; `part` is -1 for those that are in no part,
  /// which get null. Null: each part is made by `make`.
  std::function<std::shared_ptr<ProcessGroupBackend>(ProcessGroupBackend& parent, int part,
                                                     OwnBackendOptions options)>
      split = {};
  /// As `make`, for those that are left of a group whose backend is `old`; `excluded` are ranks of
  /// it. Null: `make` is called.
  std::function<std::shared_ptr<ProcessGroupBackend>(
      ProcessGroupBackend& old, const std::vector<int>& excluded, OwnBackendOptions options)>
      shrink = {};
  /// As `make`, for a group of the members of another one and of ranks that join it; `old` is that
  /// group's backend, null on ranks that join. Null: `make` is called.
  std::function<std::shared_ptr<ProcessGroupBackend>(ProcessGroupBackend* old,
                                                     OwnBackendOptions options)>
      grow = {};
  /// The job that the library's own launcher has started, for ranks that nothing else tells of one.
  /// Null: it has no launcher.
  std::function<Result<store::Rendezvous>(const store::RendezvousOptions& options)> own_job = {};
};
void add_own_backend(OwnBackend backend);
/// Null if the program does not link its layer.
const OwnBackend* own_backend(const Backend& name);

}  // namespace muster::group

namespace muster {

/// Checks that options belong to a backend of the group. Throws DistBackendError
/// (Code::unsupported), naming both, if no backend of `config` accepts `options`. Null is always
/// accepted.
void check_pg_options(const ProcessGroupOptions* options, const BackendConfig& config,
                      std::string_view caller);

}  // namespace muster
