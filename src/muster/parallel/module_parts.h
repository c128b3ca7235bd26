/// What DistributedDataParallel knows of a module.
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

/// What is known of a module, whatever language it is written in.
struct ModuleParts {
  struct Named {
    std::string name;
    at::Tensor tensor;
    bool sparse = false;  ///< a parameter whose gradients will be
  };
  std::string class_name;  ///< for the log
  std::vector<Named>
      parameters;  ///< by registration; shared ones may be there as often as they are registered
  std::vector<Named> buffers;
  std::shared_ptr<const void> keeps_alive = {};
  /// The buffers as they are now, where others may come in their place; called before they travel.
  std::function<std::vector<at::Tensor>()> buffers_now = {};
};

/// Of a module of C++'s.
ModuleParts parts_of(torch::nn::Module& module);

/// Each tensor once, under its first name: one may be registered in several modules. Undefined ones
/// are left out.
std::vector<ModuleParts::Named> once_each(const std::vector<ModuleParts::Named>& registered);

/// What `module.parameters()` gives, in its order, without a copy of every name. `expected`: about
/// how many.
std::vector<at::Tensor> parameters_of(const torch::nn::Module& module, std::size_t expected);

}  // namespace muster::parallel
