// SPDX-License-Identifier: BSD-3-Clause
/// DistributedDataParallel's view of a module.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace muster::parallel {

/// Parameters and buffers of a module in any language.
struct ModuleParts {
  struct Named {
    std::string name;
    at::Tensor tensor;
    bool sparse = false;  ///< its gradients will be sparse
  };
  std::string class_name;  ///< for the log
  /// In registration order. A shared parameter may appear once per registration.
  std::vector<Named> parameters;
  std::vector<Named> buffers;
  std::shared_ptr<const void> keeps_alive = {};
  /// Returns the current buffers, for modules that replace them; called before they are broadcast.
  std::function<std::vector<at::Tensor>()> buffers_now = {};
};

/// The parts of a C++ module.
ModuleParts parts_of(torch::nn::Module& module);

/// Removes duplicates, keeping each tensor's first name, and undefined tensors. A tensor may be
/// registered in several modules.
std::vector<ModuleParts::Named> once_each(const std::vector<ModuleParts::Named>& registered);

/// Same as `module.parameters()`, without copying names. `expected` is an estimate of their number.
std::vector<at::Tensor> parameters_of(const torch::nn::Module& module, std::size_t expected);

}  // namespace muster::parallel
