#include "muster/backend_name.h"

#include <c10/core/Device.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "muster/backends/mpi/loader.h"
#include "muster/group/backend_registry.h"
#include "muster/group/errors.h"

namespace muster {
namespace {

struct BackendRow {
  Backend backend;
  bool (*available)();
};
bool always() { return true; }
bool never() { return false; }
bool with_mpi() { return mpi::load().ok(); }

// The built-in backends, and whether they can be used here.
constexpr std::array<BackendRow, 6> kBackends{{
    {Backend::NATIVE, &always},
    {Backend::GLOO, &always},
    {Backend::TCP, &always},
    {Backend::NCCL, &never},
    {Backend::MPI, &with_mpi},
    {Backend::UCC, &never},
}};

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
  for (const auto& row : kBackends) {
    if (row.backend.name_ == wanted) {
      name_ = row.backend.name_;
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
  return std::any_of(
             kBackends.begin(), kBackends.end(),
             [&](const BackendRow& row) { return row.backend == *this && row.available(); }) ||
         group::registered_backend(name_) != nullptr;
}

Duration Backend::default_timeout() const {
  return *this == Backend::NCCL ? std::chrono::minutes(10) : std::chrono::minutes(30);
}

std::vector<std::string> Backend::known() {
  std::vector<std::string> names;
  for (const auto& row : kBackends) names.emplace_back(row.backend.name());
  const auto registered = group::registered_backends();
  names.insert(names.end(), registered.begin(), registered.end());
  return names;
}

BackendConfig BackendConfig::parse(const std::optional<std::string>& text) {
  BackendConfig config;
  if (!text || text->empty()) {
    config.entries_.emplace_back(c10::DeviceType::CPU, Backend::NATIVE);
    config.text_ = "cpu:native";
    if (is_nccl_available()) {
      config.entries_.emplace_back(c10::DeviceType::CUDA, Backend::NCCL);
      config.text_ += ",cuda:nccl";
    }
    return config;
  }
  config.text_ = lower(*text);
  if (config.text_.find(':') == std::string::npos) {
    // One name for all devices: each backend declares the devices it serves.
    const Backend backend(config.text_);
    if (const auto* registered = group::registered_backend(backend.name())) {
      for (const auto device : registered->devices) config.entries_.emplace_back(device, backend);
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

}  // namespace muster
