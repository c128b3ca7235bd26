#include "core/group/creation/backend_registry.h"

#include <c10/core/Device.h>
#include <dlfcn.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <mutex>
#include <utility>

#include "core/group/errors.h"

namespace muster {
namespace {

// Backend names are process-wide, like the libraries that register them. Entries are never changed
// or removed.
struct BackendTable {
  std::mutex mutex;
  std::map<std::string, group::RegisteredBackend, std::less<>> backends;
  std::map<std::string, group::OwnBackend, std::less<>> own;
};
BackendTable& registry() {
  static BackendTable instance;
  return instance;
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::vector<c10::DeviceType> device_types(const std::string& backend,
                                          const std::vector<std::string>& names) {
  if (names.empty()) return {c10::DeviceType::CPU, c10::DeviceType::CUDA};
  std::vector<c10::DeviceType> types;
  for (const auto& name : names) {
    try {
      types.push_back(c10::Device(lower(name)).type());
    } catch (const std::exception&) {
      group::invalid("register_backend('" + backend + "'): '" + name + "' is no kind of device");
    }
  }
  return types;
}

class Registrar final : public BackendRegistrar {
 public:
  void add(const std::string& name, ExtendedBackendCreator func,
           const std::vector<std::string>& devices) override {
    group::add_backend(name, std::move(func), devices);
    names.push_back(lower(name));
  }
  std::vector<std::string> names;
};

template <class Function>
Function* symbol(void* library, const char* name, const std::string& path) {
  auto* found = reinterpret_cast<Function*>(::dlsym(library, name));
  if (found == nullptr)
    group::invalid("load_backend_plugin: " + path +
                   " is no backend plugin of muster: it exports no " + name +
                   " (see load_backend_plugin in muster/backend.h)");
  return found;
}

}  // namespace

namespace group {

const RegisteredBackend* registered_backend(std::string_view name) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto at = all.backends.find(name);
  return at == all.backends.end() ? nullptr : &at->second;
}

std::vector<std::string> registered_backends() {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::vector<std::string> names;
  for (const auto& [name, backend] : all.backends) names.push_back(name);
  return names;
}

void add_backend(const std::string& name, ExtendedBackendCreator func,
                 const std::vector<std::string>& devices) {
  const auto wanted = lower(name);
  const bool plain =
      !wanted.empty() && std::all_of(wanted.begin(), wanted.end(),
                                     [](unsigned char c) { return std::isalnum(c) || c == '_'; });
  if (!plain)
    invalid("register_backend: '" + name + "' is no name for a backend; use letters, digits and _");
  if (!func) invalid("register_backend('" + name + "'): the function that makes it is empty");
  auto types = device_types(wanted, devices);
  const auto taken = Backend::known();
  if (wanted == "undefined" || std::find(taken.begin(), taken.end(), wanted) != taken.end())
    invalid("register_backend: there is a backend '" + wanted + "' already");
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  if (!all.backends
           .try_emplace(wanted, RegisteredBackend{wanted, std::move(func), std::move(types)})
           .second)
    invalid("register_backend: there is a backend '" + wanted + "' already");
}

bool is_native(const Backend& backend) {
  return backend == Backend::NATIVE || backend == Backend::GLOO || backend == Backend::TCP;
}

void add_own_backend(OwnBackend backend) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.own.try_emplace(std::string(backend.name.name()), std::move(backend));
}

const OwnBackend* own_backend(const Backend& name) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto at = all.own.find(name.name());
  return at == all.own.end() ? nullptr : &at->second;
}

}  // namespace group

void Backend::register_backend(const std::string& name, BackendCreator func, bool extended_api,
                               const std::vector<std::string>& devices) {
  if (extended_api)
    group::invalid("register_backend('" + name +
                   "'): with extended_api the function takes (const DistributedBackendOptions&, "
                   "const std::shared_ptr<ProcessGroupOptions>&)");
  if (!func) return group::add_backend(name, nullptr, devices);
  group::add_backend(
      name,
      [func = std::move(func)](const DistributedBackendOptions& options,
                               const std::shared_ptr<ProcessGroupOptions>&) {
        return func(options.store, options.group_rank, options.group_size, options.timeout);
      },
      devices);
}

void Backend::register_backend(const std::string& name, ExtendedBackendCreator func,
                               bool extended_api, const std::vector<std::string>& devices) {
  if (!extended_api)
    group::invalid(
        "register_backend('" + name +
        "'): without extended_api the function takes (store, rank, world_size, timeout)");
  group::add_backend(name, std::move(func), devices);
}

std::vector<std::string> load_backend_plugin(const std::string& path) {
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    group::invalid("load_backend_plugin: " + path + " cannot be loaded: " + ::dlerror());
  const unsigned abi = symbol<unsigned()>(library, "muster_backend_plugin_abi", path)();
  if (abi != kBackendPluginAbi)
    group::invalid("load_backend_plugin: " + path + " was made for plugin interface " +
                   std::to_string(abi) + ", this muster has " + std::to_string(kBackendPluginAbi) +
                   "; build it again with this version's headers");
  Registrar registrar;
  symbol<void(BackendRegistrar&)>(library, "muster_register_backends", path)(registrar);
  return registrar.names;
}

}  // namespace muster
