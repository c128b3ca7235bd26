/// Data each worker sends to the others when it joins: its name, and its device maps, because
/// replies use the caller's maps.
#pragma once

#include <map>
#include <string>

#include "muster/rpc_options.h"

namespace muster::rpc {

struct Introduction {
  std::string name;
  std::map<std::string, DeviceMap> device_maps;  ///< by callee
};

std::string introduce(const std::string& name, const RpcBackendOptions& options);
/// Throws DistError if the text sent by `rank` is malformed.
Introduction read_introduction(const std::string& text, int rank);

}  // namespace muster::rpc
