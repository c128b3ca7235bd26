/// What each worker tells the others of itself when they meet: its name, and its device maps, since
/// answers use the maps of those who asked.
#pragma once

#include <map>
#include <string>

#include "muster/rpc/options.h"

namespace muster::rpc {

struct Introduction {
  std::string name;
  std::map<std::string, DeviceMap> device_maps;  ///< by callee
};

std::string introduce(const std::string& name, const RpcBackendOptions& options);
/// Throws DistError where the text, which `rank` has sent, cannot be read.
Introduction read_introduction(const std::string& text, int rank);

}  // namespace muster::rpc
