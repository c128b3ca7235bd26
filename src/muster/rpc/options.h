/// Who takes part, and what init_rpc may be told. torch.distributed.rpc's names and defaults.
#pragma once

#include <c10/core/Device.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/clock.h"

namespace muster::rpc {

inline constexpr int kDefaultWorkerThreads = 16;
inline constexpr Duration kDefaultRpcTimeout = std::chrono::seconds(60);
inline constexpr const char* kDefaultInitMethod = "env://";

/// A worker by name and number. Only the layer makes them: ask get_worker_info.
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

/// A worker as a caller names it: by name, rank or WorkerInfo.
class To {
 public:
  To(const char* name) : name_(name) {}
  To(std::string name) : name_(std::move(name)) {}
  To(std::string_view name) : name_(name) {}
  To(int id) : id_(id) {}
  To(const WorkerInfo& worker) : id_(worker.id()) {}
  const std::string& name() const { return name_; }  ///< empty where it is given by number
  int id() const { return id_; }

 private:
  std::string name_;
  int id_ = -1;
};

/// A device as the keys of device maps take it: an index (of CUDA), text ("cuda:1", "cpu") or a
/// device.
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

/// This worker's devices to the callee's; one to one.
using DeviceMap = std::map<DeviceName, DeviceName>;

struct RpcBackendOptions {
  Duration rpc_timeout = kDefaultRpcTimeout;       ///< of calls that say none; zero: never
  std::string init_method = kDefaultInitMethod;    ///< as init_process_group's
  int num_worker_threads = kDefaultWorkerThreads;  ///< of functions that calls run here; at least 1
  std::map<std::string, DeviceMap> device_maps;    ///< by callee
  std::vector<DeviceName> devices;                 ///< empty: those of `device_maps`
  bool shared_memory = true;                       ///< false: sockets only, also within a host

  /// Adds to what was set before; throws DistError where two devices would become one, or a device
  /// another than before.
  RpcBackendOptions& set_device_map(const std::string& to, const DeviceMap& map);
  /// CUDA devices only, as torch's.
  RpcBackendOptions& set_devices(std::vector<DeviceName> devices);
};
/// torch's name for the options of its default backend: the native agent takes the same.
using TensorPipeRpcBackendOptions = RpcBackendOptions;

/// Throws DistError where timeouts, thread counts, devices or maps cannot be meant.
void check_options(const RpcBackendOptions& options);

}  // namespace muster::rpc
