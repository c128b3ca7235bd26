/// Backends from outside muster, registered at run time by a program or by a plugin library.
///
/// A backend implements `ProcessGroupBackend`; a registered function makes one for each group.
/// docs/user/how-to-add-a-backend.md walks through it. Thread-safe.
#pragma once

#include <c10/core/DeviceType.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/init.h"
#include "muster/group/process_group_backend.h"
#include "muster/group/store.h"

namespace muster {

/// Arguments of a function of the extended form.
struct DistributedBackendOptions {
  std::shared_ptr<Store> store;  ///< private to this group
  int group_rank = -1;
  int group_size = 0;
  Duration timeout{};
  std::string group_id;                    ///< equal on all members, unique to the group
  std::vector<int> global_ranks_in_group;  ///< ranks of the default group, indexed by group rank
};

/// Makes the backend of one group. Called on every member; may block until all members have
/// arrived. Exceptions propagate to the caller that creates the group.
using BackendCreator = std::function<std::shared_ptr<ProcessGroupBackend>(
    const std::shared_ptr<Store>& store, int rank, int world_size, Duration timeout)>;
using ExtendedBackendCreator = std::function<std::shared_ptr<ProcessGroupBackend>(
    const DistributedBackendOptions& options,
    const std::shared_ptr<ProcessGroupOptions>& pg_options)>;

/// The interface through which a plugin library registers its backends.
class BackendRegistrar {
 public:
  virtual ~BackendRegistrar() = default;
  virtual void add(const std::string& name, ExtendedBackendCreator func,
                   const std::vector<std::string>& devices) = 0;
};

/// Version of the plugin interface; a plugin and the program that loads it must agree on it. A
/// plugin exports, with C linkage,
///     // returns kBackendPluginAbi
///     unsigned muster_backend_plugin_abi();
///     void muster_register_backends(muster::BackendRegistrar& registrar);
/// It links with LibTorch and needs no library of muster: everything it receives works through
/// virtual calls.
inline constexpr unsigned kBackendPluginAbi = 2;

/// Loads a plugin library, which registers its backends and stays loaded until the process exits.
/// Returns the backends' names. Throws DistError if the library cannot be loaded, is no plugin, or
/// was built for another plugin interface version.
std::vector<std::string> load_backend_plugin(const std::string& path);

namespace group {

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

}  // namespace group
}  // namespace muster
