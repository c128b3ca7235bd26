// SPDX-License-Identifier: BSD-3-Clause
#include "muster/remote_module.h"

namespace muster::rpc::detail {

std::pair<std::string, at::Device> parse_remote_device(const std::string& text) {
  const auto slash = text.find('/');
  const std::string worker = text.substr(0, slash);
  const std::string device = slash == std::string::npos ? "cpu" : text.substr(slash + 1);
  const auto refuse = [&] {
    throw DistError("RemoteModule: '" + text +
                    "' is no remote device: \"worker/device\", as \"trainer0/cuda:0\", or "
                    "\"worker\" for its cpu");
  };
  if (worker.empty() || device.empty() || device.find('/') != std::string::npos) refuse();
  try {
    return {worker, at::Device(device)};
  } catch (const c10::Error&) {
    refuse();
  }
  return {worker, at::kCPU};
}

std::vector<RRef<at::Tensor>> parameter_rrefs(const torch::nn::Module& module, bool recurse) {
  std::vector<RRef<at::Tensor>> parameters;
  for (const at::Tensor& parameter : module.parameters(recurse)) parameters.emplace_back(parameter);
  return parameters;
}

}  // namespace muster::rpc::detail
