/// Backends from outside muster: registered by a program at run time, or by a plugin library.
///
/// A backend implements `ProcessGroupBackend`; a function makes one for each group.
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

/// What a group's backend is made of, for functions of the extended form.
struct DistributedBackendOptions {
  std::shared_ptr<Store> store;  ///< of this group alone
  int group_rank = -1;
  int group_size = 0;
  Duration timeout{};
  std::string group_id;                    ///< the same on all members, different for every group
  std::vector<int> global_ranks_in_group;  ///< ranks of the default group, by rank of this group
};

/// Called on every member of a group that is made; may block until all members have come. What it
/// throws, the making throws.
using BackendCreator = std::function<std::shared_ptr<ProcessGroupBackend>(
    const std::shared_ptr<Store>& store, int rank, int world_size, Duration timeout)>;
using ExtendedBackendCreator = std::function<std::shared_ptr<ProcessGroupBackend>(
    const DistributedBackendOptions& options,
    const std::shared_ptr<ProcessGroupOptions>& pg_options)>;

/// What a plugin library registers its backends with.
class BackendRegistrar {
 public:
  virtual ~BackendRegistrar() = default;
  virtual void add(const std::string& name, ExtendedBackendCreator func,
                   const std::vector<std::string>& devices) = 0;
};

/// What a plugin and the program that loads it must have in common. A plugin exports, with C
/// linkage,
///     // returns kBackendPluginAbi
///     unsigned muster_backend_plugin_abi();
///     void muster_register_backends(muster::BackendRegistrar& registrar);
/// It is linked with LibTorch and needs no library of muster's: what it gets works by virtual
/// calls.
inline constexpr unsigned kBackendPluginAbi = 2;

/// Loads a plugin library, which registers its backends, and keeps it for the rest of the process.
/// Returns their names. Throws DistError where the library cannot be loaded, is no plugin, or was
/// made for another muster.
std::vector<std::string> load_backend_plugin(const std::string& path);

namespace group {

struct RegisteredBackend {
  std::string name;
  ExtendedBackendCreator make;
  std::vector<c10::DeviceType> devices;
};
/// Null where there is none of that (lower-case) name; else valid for ever.
const RegisteredBackend* registered_backend(std::string_view name);
std::vector<std::string> registered_backends();
void add_backend(const std::string& name, ExtendedBackendCreator func,
                 const std::vector<std::string>& devices);

}  // namespace group
}  // namespace muster
