// SPDX-License-Identifier: BSD-3-Clause
#include "muster/data_parallel.h"
#include "core/group/errors.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ParallelGuard.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>
#include <exception>
#include <thread>

#include "core/base/threads/thread_start.h"

namespace muster::parallel {
namespace {

namespace autograd = torch::autograd;

/// Backward of copying a parameter's value to each replica.
struct SumOfCopies : autograd::Node {
  explicit SumOfCopies(c10::Device device) : device(device) {}
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    at::Tensor sum;
    for (const at::Tensor& gradient : gradients) {
      if (!gradient.defined()) continue;
      const auto here = gradient.to(device);
      sum = sum.defined() ? sum + here : here;
    }
    return {sum};
  }
  c10::Device device;
};

std::vector<c10::Device> devices_for(const torch::nn::Module& module,
                                     const DataParallelOptions& options) {
  auto tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  const c10::Device device = tensors.empty() ? c10::Device(at::kCPU) : tensors.front().device();
  if (device.is_cpu()) {
    if (options.device_ids)
      group::invalid(
          "DataParallel: device_ids are devices of an accelerator, and the module is on " +
          device.str() + "; move it there, or set replicas");
    if (options.output_device)
      group::invalid("DataParallel: output_device needs a module on an accelerator");
    if (options.replicas < 1) group::invalid("DataParallel: replicas must be at least 1");
  }
  std::vector<c10::Device> devices;
  if (options.device_ids) {
    for (const int id : *options.device_ids)
      devices.emplace_back(device.type(), static_cast<c10::DeviceIndex>(id));
    if (devices.empty()) group::invalid("DataParallel: device_ids is empty");
  } else if (!device.is_cpu()) {
    const auto count = c10::impl::VirtualGuardImpl(device.type()).deviceCount();
    for (c10::DeviceIndex id = 0; id < count; ++id) devices.emplace_back(device.type(), id);
  } else {
    devices.assign(static_cast<std::size_t>(options.replicas), device);
  }
  for (const at::Tensor& tensor : tensors)
    if (tensor.device() != devices.front())
      group::invalid("DataParallel: the module must have its parameters and buffers on " +
                     devices.front().str() + ", the first of its devices; one of them is on " +
                     tensor.device().str());
  return devices;
}

std::shared_ptr<torch::nn::Module> copy_of(const torch::nn::Module& module, c10::Device device) {
  std::shared_ptr<torch::nn::Module> copy;
  try {
    copy = module.clone(device);
  } catch (const std::exception& error) {
    group::invalid(
        "DataParallel cannot copy the module " + module.name() +
        "; derive its class and its children's from torch::nn::Cloneable, or give it a clone(): " +
        error.what());
  }
  if (copy->parameters().size() != module.parameters().size() ||
      copy->buffers().size() != module.buffers().size())
    group::invalid("DataParallel: the clone() of the module " + module.name() +
                   " gives other parameters or buffers than the module has");
  return copy;
}

}  // namespace

ReplicaSet::ReplicaSet(torch::nn::Module& original, const DataParallelOptions& options)
    : original_(original), devices_(devices_for(original, options)), dim_(options.dim) {
  output_device_ = options.output_device
                       ? c10::Device(devices_.front().type(),
                                     static_cast<c10::DeviceIndex>(*options.output_device))
                       : devices_.front();
  for (const c10::Device device : devices_) replicas_.push_back(copy_of(original, device));
}

std::size_t ReplicaSet::parts(const std::vector<at::Tensor>& inputs) const {
  std::optional<std::size_t> parts;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || input.dim() == 0) continue;
    const auto these = input.chunk(static_cast<std::int64_t>(size()), dim_).size();
    if (parts && *parts != these)
      group::invalid("DataParallel: the inputs have different sizes along dimension " +
                     std::to_string(dim_) + ": one makes " + std::to_string(*parts) +
                     " parts, another of size " + std::to_string(input.size(dim_)) + " makes " +
                     std::to_string(these));
    parts = these;
  }
  return parts.value_or(1);
}

at::Tensor ReplicaSet::part(const at::Tensor& input, std::size_t index) const {
  if (!input.defined()) return input;
  return (input.dim() == 0 ? input : input.chunk(static_cast<std::int64_t>(size()), dim_)[index])
      .to(devices_[index]);
}

at::Tensor ReplicaSet::joined(const std::vector<at::Tensor>& parts) const {
  if (!parts.front().defined()) return parts.front();
  std::vector<at::Tensor> here;
  here.reserve(parts.size());
  for (const at::Tensor& part : parts) here.push_back(part.to(output_device_));
  return here.front().dim() == 0 ? at::stack(here) : at::cat(here, dim_);
}

void ReplicaSet::refresh(std::size_t count) {
  const auto parameters = original_.parameters();
  const auto buffers = original_.buffers();
  std::vector<c10::intrusive_ptr<autograd::Node>> sums(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!at::GradMode::is_enabled() || !parameters[i].requires_grad()) continue;
    sums[i] = c10::make_intrusive<SumOfCopies>(parameters[i].device());
    sums[i]->set_next_edges(autograd::collect_next_edges(parameters[i]));
  }
  const at::NoGradGuard no_grad;
  for (std::size_t index = 0; index < count; ++index) {
    auto theirs = replicas_[index]->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      theirs[i].detach_();
      theirs[i].set_requires_grad(false);
      theirs[i].set_data(parameters[i].detach().to(devices_[index]));
      if (sums[i]) autograd::set_history(theirs[i], sums[i]);
    }
    auto their_buffers = replicas_[index]->buffers();
    for (std::size_t i = 0; i < buffers.size(); ++i)
      their_buffers[i].set_data(buffers[i].detach().to(devices_[index], buffers[i].scalar_type(),
                                                       /*non_blocking=*/false, /*copy=*/index > 0));
    replicas_[index]->train(original_.is_training());
    // Parents come before their children, so a child's own mode is set last.
    const auto inner = original_.modules(/*include_self=*/false),
               copies = replicas_[index]->modules(/*include_self=*/false);
    for (std::size_t i = 0; i < std::min(inner.size(), copies.size()); ++i)
      copies[i]->train(inner[i]->is_training());
  }
}

void ReplicaSet::run(std::size_t count, const std::function<void(std::size_t)>& body) const {
  std::vector<std::exception_ptr> failures(count);
  const at::ThreadLocalState modes;
  const auto one = [&](std::size_t index) {
    try {
      const at::ThreadLocalStateGuard same_modes(modes);
      const c10::OptionalDeviceGuard on(
          devices_[index].is_cpu() ? std::nullopt : std::optional<c10::Device>(devices_[index]));
      // The replicas are the parallelism; kernels that start their own threads would compete for
      // cores.
      const c10::ParallelGuard alone(count > 1 || c10::ParallelGuard::is_enabled());
      body(index);
    } catch (...) {
      failures[index] = std::current_exception();
    }
  };
  {
    // They run the user's modules, and all of them end here, whatever is thrown.
    struct Threads : std::vector<std::thread> {
      ~Threads() {
        for (std::thread& each : *this) each.join();
      }
    } threads;
    threads.reserve(count);
    for (std::size_t index = 1; index < count; ++index)
      threads.push_back(group::take(start_thread("the thread of a replica", [&one, index] {
        const ProgramSignals programs;
        one(index);
      })));
    one(0);
  }
  for (const auto& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace muster::parallel
