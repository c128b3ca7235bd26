// SPDX-License-Identifier: BSD-3-Clause
/// Workers and the options of init_rpc, with torch.distributed.rpc's names and defaults.
#pragma once

#include <c10/core/Device.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/clock.h"

namespace muster::rpc {

inline constexpr int kDefaultWorkerThreads = 16;
inline constexpr Duration kDefaultRpcTimeout = std::chrono::seconds(60);
inline constexpr const char* kDefaultInitMethod = "env://";

/// A worker's name and id. Obtain one from get_worker_info.
class WorkerInfo {
 public:
  const std::string& name() const { return name_; }
  int id() const { return id_; }
  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;

 private:
  friend class WorkerTable;
  WorkerInfo(std::string name, int id) : name_(std::move(name)), id_(id) {}
  std::string name_;
  int id_ = -1;
};

/// A call's destination: a worker's name, rank or WorkerInfo.
class To {
 public:
  To(const char* name) : name_(name) {}
  To(std::string name) : name_(std::move(name)) {}
  To(std::string_view name) : name_(name) {}
  To(int id) : id_(id) {}
  To(const WorkerInfo& worker) : id_(worker.id()) {}
  const std::string& name() const { return name_; }  ///< empty if given by number
  int id() const { return id_; }

 private:
  std::string name_;
  int id_ = -1;
};

/// A device in a device map: a device, text ("cuda:1", "cpu"), or an index of the machine's
/// accelerator (CUDA if there is none).
class DeviceName {
 public:
  DeviceName(int index);
  DeviceName(const char* text);
  DeviceName(const std::string& text);
  DeviceName(at::Device device) : device_(device) {}
  at::Device device() const { return device_; }
  friend bool operator<(const DeviceName& a, const DeviceName& b);

 private:
  at::Device device_;
};

/// Maps this worker's devices to the callee's, one to one.
using DeviceMap = std::map<DeviceName, DeviceName>;

struct RpcBackendOptions {
  Duration rpc_timeout = kDefaultRpcTimeout;  ///< timeout of calls that give none; zero: no limit
  std::string init_method = kDefaultInitMethod;  ///< as in init_process_group
  /// Threads that run called functions on this worker; at least 1.
  int num_worker_threads = kDefaultWorkerThreads;
  std::map<std::string, DeviceMap> device_maps;  ///< by callee
  std::vector<DeviceName> devices;               ///< empty: those in `device_maps`
  /// False: sockets only, even within a host.
  bool shared_memory = true;

  /// Adds to the maps set before. Throws DistError if two devices would map to one, or if a device
  /// is already mapped to another.
  RpcBackendOptions& set_device_map(const std::string& to, const DeviceMap& map);
  /// Accelerators only, as in torch.
  RpcBackendOptions& set_devices(std::vector<DeviceName> devices);
};
/// torch's name for its default backend's options; the native agent takes the same ones.
using TensorPipeRpcBackendOptions = RpcBackendOptions;

/// Throws DistError if timeouts, thread counts, devices or maps are invalid.
void check_options(const RpcBackendOptions& options);

}  // namespace muster::rpc
