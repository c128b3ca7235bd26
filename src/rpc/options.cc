// SPDX-License-Identifier: BSD-3-Clause
#include "muster/rpc_options.h"

#include <algorithm>

#include "core/group/errors.h"
#include "muster/backend_name.h"

namespace muster::rpc {
namespace {

at::Device parse(const std::string& text) {
  try {
    return at::Device(text);
  } catch (const std::exception&) {
    group::invalid("'" + text + "' is no device; say \"cuda:1\", \"cpu\", or an index");
  }
}

/// Adds the entries of `added` to `map`, for the callee `to`.
void merge(DeviceMap& map, const DeviceMap& added, const std::string& to) {
  for (const auto& [from, into] : added) {
    if (const auto before = map.find(from);
        before != map.end() && before->second.device() != into.device())
      group::invalid("the device map to worker '" + to + "' takes " + from.device().str() + " to " +
                     before->second.device().str() + " and to " + into.device().str() +
                     "; a device goes to one device");
    for (const auto& [other, taken] : map) {
      if (taken.device() == into.device() && other.device() != from.device())
        group::invalid("the device map to worker '" + to + "' takes " + other.device().str() +
                       " and " + from.device().str() + " to " + into.device().str() +
                       "; it must be one to one, so that answers find back");
    }
    map.insert_or_assign(from, into);
  }
}

}  // namespace

DeviceName::DeviceName(int index)
    : device_(accelerator_type(), static_cast<c10::DeviceIndex>(index)) {
  if (index < 0 || index > 127) group::invalid(std::to_string(index) + " is no index of a device");
}
DeviceName::DeviceName(const char* text) : device_(parse(text)) {}
DeviceName::DeviceName(const std::string& text) : device_(parse(text)) {}

bool operator<(const DeviceName& a, const DeviceName& b) {
  if (a.device_.type() != b.device_.type()) return a.device_.type() < b.device_.type();
  return a.device_.index() < b.device_.index();
}

RpcBackendOptions& RpcBackendOptions::set_device_map(const std::string& to, const DeviceMap& map) {
  auto merged = device_maps[to];
  merge(merged, map, to);
  device_maps[to] = std::move(merged);
  return *this;
}

RpcBackendOptions& RpcBackendOptions::set_devices(std::vector<DeviceName> given) {
  for (const auto& device : given) {
    if (device.device().is_cpu())
      group::invalid("set_devices takes accelerators; " + device.device().str() + " is none");
  }
  devices = std::move(given);
  return *this;
}

void check_options(const RpcBackendOptions& options) {
  if (options.rpc_timeout < Duration::zero())
    group::invalid("rpc_timeout must not be negative; zero is none");
  if (options.num_worker_threads < 1)
    group::invalid("num_worker_threads is " + std::to_string(options.num_worker_threads) +
                   "; functions need at least one thread");
  for (const auto& [to, map] : options.device_maps) {
    DeviceMap checked;
    merge(checked, map, to);
  }
  if (!options.devices.empty()) {
    for (const auto& [to, map] : options.device_maps) {
      for (const auto& [from, into] : map) {
        const bool listed = std::any_of(
            options.devices.begin(), options.devices.end(),
            [&device = from](const DeviceName& d) { return d.device() == device.device(); });
        if (!from.device().is_cpu() && !listed)
          group::invalid("the device map to worker '" + to + "' names " + from.device().str() +
                         ", which is not among `devices`");
      }
    }
  }
}

}  // namespace muster::rpc
