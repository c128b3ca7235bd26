// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/creation/backend_registry.h"

#include <c10/core/Device.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "muster/backend_name.h"

namespace muster {
namespace {

// Backend names are process-wide, like the libraries that register them. Entries are never changed
// or removed.
struct BackendTable {
  std::mutex mutex;  // guards both maps; their entries are read without it
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

namespace {

// muster's own backends.
constexpr std::array<Backend, 6> kBackends{Backend::NATIVE, Backend::GLOO, Backend::TCP,
                                           Backend::NCCL,   Backend::MPI,  Backend::UCC};

/// Whether this process can see a GPU.
bool has_gpu() {
  constexpr auto kCuda = c10::DeviceType::CUDA;
  return c10::impl::hasDeviceGuardImpl(kCuda) &&
         c10::impl::getDeviceGuardImpl(kCuda)->deviceCount() > 0;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

std::string quoted_list(const std::vector<std::string>& names) {
  std::string out;
  for (const auto& name : names) out += (out.empty() ? "'" : ", '") + name + "'";
  return out;
}

c10::DeviceType device_type(const std::string& name, const std::string& text) {
  try {
    const c10::Device device(name);
    if (!device.has_index()) return device.type();
  } catch (const std::exception&) {
    // the message below says more than torch's
  }
  group::invalid("backend '" + text + "': '" + name +
                 "' is no kind of device; write '<device>:<backend>' pairs separated by commas, "
                 "such as 'cpu:native,cuda:nccl'");
}

}  // namespace

Backend::Backend(std::string_view name) {
  const auto wanted = lower(name);
  for (const auto& backend : kBackends) {
    if (backend.name_ == wanted) {
      name_ = backend.name_;
      return;
    }
  }
  if (const auto* registered = group::registered_backend(wanted)) {
    name_ = registered->name;
    return;
  }
  group::invalid("there is no backend '" + std::string(name) + "'; the known ones are " +
                 quoted_list(known()));
}

bool Backend::is_available() const {
  if (group::is_native(*this) || group::registered_backend(name_) != nullptr) return true;
  const auto* own = group::own_backend(*this);
  return own != nullptr && own->usable().ok();
}

std::string Backend::why_unavailable() const {
  if (is_available()) return {};
  const auto* own = group::own_backend(*this);
  return own == nullptr ? "is not in this build of muster"
                        : "cannot be used: " + own->usable().message();
}

Duration Backend::default_timeout() const {
  return *this == Backend::NCCL ? std::chrono::minutes(10) : std::chrono::minutes(30);
}

std::vector<std::string> Backend::known() {
  std::vector<std::string> names;
  for (const auto& backend : kBackends) names.emplace_back(backend.name());
  const auto registered = group::registered_backends();
  names.insert(names.end(), registered.begin(), registered.end());
  return names;
}

BackendConfig BackendConfig::parse(const std::optional<std::string>& text) {
  if (!text || text->empty()) {
    const bool gpu = has_gpu(), nccl = gpu && is_nccl_available();
    if (gpu && !nccl) {
      static std::once_flag said;
      std::call_once(said, [] {
        log(LogLevel::warning, "backend 'nccl' " + Backend::NCCL.why_unavailable() +
                                   "; CUDA tensors are copied through host memory by backend "
                                   "'native' where no backend is named");
      });
    }
    return standard(gpu, nccl);
  }
  BackendConfig config;
  config.text_ = lower(*text);
  if (config.text_.find(':') == std::string::npos) {
    // One name for all devices: each backend declares the devices it serves.
    const Backend backend(config.text_);
    if (const auto* registered = group::registered_backend(backend.name())) {
      for (const auto device : registered->devices) config.entries_.emplace_back(device, backend);
      return config;
    }
    if (const auto* own = group::own_backend(backend); own != nullptr && own->usable().ok()) {
      for (const auto device : own->devices()) config.entries_.emplace_back(device, backend);
      return config;
    }
    config.entries_ = {{c10::DeviceType::CPU, backend}, {c10::DeviceType::CUDA, backend}};
    if (accelerator_type() != c10::DeviceType::CUDA)
      config.entries_.emplace_back(accelerator_type(), backend);
    return config;
  }
  for (std::size_t at = 0; at <= config.text_.size();) {
    const auto end = std::min(config.text_.find(',', at), config.text_.size());
    const auto part = config.text_.substr(at, end - at);
    at = end + 1;
    const auto colon = part.find(':');
    if (colon == std::string::npos)
      group::invalid("backend '" + *text + "': '" + part +
                     "' lacks its device; write '<device>:<backend>' pairs separated by commas");
    const auto device = device_type(part.substr(0, colon), *text);
    if (config.for_device(device))
      group::invalid("backend '" + *text + "' gives two backends for '" + part.substr(0, colon) +
                     "'");
    config.entries_.emplace_back(device, Backend(part.substr(colon + 1)));
  }
  return config;
}

BackendConfig BackendConfig::standard(bool gpu, bool nccl) {
  BackendConfig config;
  config.entries_.emplace_back(c10::DeviceType::CPU, Backend::NATIVE);
  config.text_ = "cpu:native";
  if (!gpu) return config;
  config.entries_.emplace_back(c10::DeviceType::CUDA, nccl ? Backend::NCCL : Backend::NATIVE);
  if (nccl) config.text_ += ",cuda:nccl";
  return config;
}

std::optional<Backend> BackendConfig::for_device(c10::DeviceType device) const {
  for (const auto& [type, backend] : entries_)
    if (type == device) return backend;
  return std::nullopt;
}

c10::DeviceType accelerator_type() {
  return c10::is_privateuse1_backend_registered() ? c10::DeviceType::PrivateUse1
                                                  : c10::DeviceType::CUDA;
}

Duration BackendConfig::default_timeout() const {
  Duration longest{};
  for (const auto& [device, backend] : entries_)
    longest = std::max(longest, backend.default_timeout());
  return longest;
}

bool is_available() { return true; }
bool is_gloo_available() { return Backend::GLOO.is_available(); }
bool is_mpi_available() { return Backend::MPI.is_available(); }
bool is_nccl_available() { return Backend::NCCL.is_available(); }
bool is_ucc_available() { return Backend::UCC.is_available(); }
bool is_torchelastic_launched() { return std::getenv("TORCHELASTIC_RUN_ID") != nullptr; }

void check_pg_options(const ProcessGroupOptions* options, const BackendConfig& config,
                      std::string_view caller) {
  if (options == nullptr) return;
  const bool any_registered = options->backend() == Backend::UNDEFINED;
  for (const auto& [device, backend] : config.entries())
    if (any_registered ? group::registered_backend(backend.name()) != nullptr
                       : backend == options->backend())
      return;
  throw DistBackendError(
      std::string(caller) + ": pg_options are " + std::string(options->type_name()) +
          ", which backend '" + config.text() + "' cannot use; leave them out" +
          (any_registered ? "" : ", or name backend '" + std::string(options->backend()) + "'"),
      Code::unsupported);
}

}  // namespace muster
