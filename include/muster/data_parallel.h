// SPDX-License-Identifier: BSD-3-Clause
/// DataParallel: several replicas of a module in one process, each on its own thread with its part
/// of the batch.
///
/// For several devices of one process, and for CPU tests of it. DistributedDataParallel is faster
/// with several processes, and usually even with one. Modelled on torch.nn.DataParallel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/errors.h"

namespace muster {

struct DataParallelOptions {
  /// Devices of the module's accelerator, one replica on each. Default: all of them.
  std::optional<std::vector<int>> device_ids = {};
  std::optional<int> output_device = {};  ///< default: device_ids[0]
  std::int64_t dim = 0;  ///< dimension along which inputs are split and outputs are joined
  int replicas = 1;      ///< replicas of a CPU module, instead of device_ids
};

namespace parallel {

/// Returns a copy of a structure (vectors, arrays, maps, optionals, pairs, tuples) with every
/// tensor replaced by `change(tensor)`.
template <class Change>
at::Tensor map_tensors(const at::Tensor& tensor, Change& change) {
  return change(tensor);
}
template <class T, class Change>
T map_tensors(const T& value, Change&) {
  return value;
}
template <class A, class B, class Change>
std::pair<A, B> map_tensors(const std::pair<A, B>& pair, Change& change);
template <class... T, class Change>
std::tuple<T...> map_tensors(const std::tuple<T...>& tuple, Change& change);
template <class T, class Change>
std::optional<T> map_tensors(const std::optional<T>& value, Change& change);
template <class T, class Change>
std::vector<T> map_tensors(const std::vector<T>& list, Change& change);
template <class T, std::size_t N, class Change>
std::array<T, N> map_tensors(const std::array<T, N>& list, Change& change);
template <class K, class T, class Change>
std::map<K, T> map_tensors(const std::map<K, T>& map, Change& change);

template <class A, class B, class Change>
std::pair<A, B> map_tensors(const std::pair<A, B>& pair, Change& change) {
  A first = map_tensors(pair.first, change);
  return {std::move(first), map_tensors(pair.second, change)};
}
template <class... T, class Change>
std::tuple<T...> map_tensors(const std::tuple<T...>& tuple, Change& change) {
  return std::apply(
      [&](const auto&... each) { return std::tuple<T...>{map_tensors(each, change)...}; }, tuple);
}
template <class T, class Change>
std::optional<T> map_tensors(const std::optional<T>& value, Change& change) {
  if (!value) return std::nullopt;
  return map_tensors(*value, change);
}
template <class T, class Change>
std::vector<T> map_tensors(const std::vector<T>& list, Change& change) {
  std::vector<T> mapped;
  for (const T& each : list) mapped.push_back(map_tensors(each, change));
  return mapped;
}
template <class T, std::size_t N, class Change>
std::array<T, N> map_tensors(const std::array<T, N>& list, Change& change) {
  auto mapped = list;
  for (T& each : mapped) each = map_tensors(each, change);
  return mapped;
}
template <class K, class T, class Change>
std::map<K, T> map_tensors(const std::map<K, T>& map, Change& change) {
  std::map<K, T> mapped;
  for (const auto& [key, each] : map) mapped.emplace(key, map_tensors(each, change));
  return mapped;
}

/// The tensors in some structures, in order.
template <class... T>
std::vector<at::Tensor> tensors_in(const T&... values) {
  std::vector<at::Tensor> found;
  const auto note = [&](const at::Tensor& tensor) {
    found.push_back(tensor);
    return tensor;
  };
  (static_cast<void>(map_tensors(values, note)), ...);
  return found;
}

/// The replicas and their threads, independent of the module's type.
class ReplicaSet {
 public:
  /// `original` must have its parameters and buffers on its first device. Throws DistError if the
  /// options do not fit it.
  ReplicaSet(torch::nn::Module& original, const DataParallelOptions& options);

  std::size_t size() const { return replicas_.size(); }
  torch::nn::Module& operator[](std::size_t index) { return *replicas_[index]; }

  /// Number of parts the inputs are split into: `size()`, or fewer if the dimension is shorter.
  /// Throws if input tensors would be split into different numbers of parts.
  std::size_t parts(const std::vector<at::Tensor>& inputs) const;
  /// Part `index` of an input, on its device. A zero-dimensional tensor goes to every part.
  at::Tensor part(const at::Tensor& input, std::size_t index) const;
  /// Joins the parts of an output into one tensor; zero-dimensional parts become a vector.
  at::Tensor joined(const std::vector<at::Tensor>& parts) const;

  /// Copies the original's values to the first `count` replicas. Gradients of their parameters flow
  /// to the original's, summed in replica order. The first replica uses the original's buffers, so
  /// forward's writes to them persist; on other replicas they are lost.
  void refresh(std::size_t count);
  /// Runs body(0) .. body(count - 1), each on its device and with this thread's autograd modes;
  /// body(0) runs on this thread. After all have ended, throws the exception of the lowest index
  /// that failed.
  void run(std::size_t count, const std::function<void(std::size_t)>& body) const;

 private:
  torch::nn::Module& original_;
  std::vector<c10::Device> devices_;
  c10::Device output_device_ = at::kCPU;
  std::int64_t dim_;
  std::vector<std::shared_ptr<torch::nn::Module>> replicas_;
};

}  // namespace parallel

/// `Module` is a module holder (`Linear`, `Sequential`, any TORCH_MODULE type) or a shared_ptr to a
/// module, of a class that can be cloned (torch::nn::Cloneable, or its own clone()). Replicas are
/// created once, at construction. Before each forward they receive the module's parameters, buffers
/// and training mode, but no other later change to the module, such as a dropout rate. Not
/// thread-safe.
///
///   DataParallel<Net> model(net, {.device_ids = std::vector<int>{0, 1}});
///   loss_of(model(inputs), targets).backward();   // net's gradients are those of the whole batch
///
/// Inputs may be on any device. Every tensor in the arguments is split along `dim`, as by
/// at::chunk; other arguments are passed to every replica. Outputs are tensors, or vectors, maps,
/// optionals, pairs and tuples of them; they are joined along `dim` on the output device.
template <class Module>
class DataParallel {
 public:
  explicit DataParallel(Module module, const DataParallelOptions& options = {})
      : module_(std::move(module)), replicas_(*module_, options) {}
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  template <class... Arguments>
  auto forward(const Arguments&... arguments) {
    using Output = std::decay_t<decltype(module_->forward(arguments...))>;
    const auto count = replicas_.parts(parallel::tensors_in(arguments...));
    replicas_.refresh(count);
    std::vector<std::optional<Output>> outputs(count);
    replicas_.run(count, [&](std::size_t index) {
      const auto part = [&](const at::Tensor& input) { return replicas_.part(input, index); };
      outputs[index].emplace(
          static_cast<Inner&>(replicas_[index]).forward(parallel::map_tensors(arguments, part)...));
    });
    return joined(outputs);
  }
  template <class... Arguments>
  auto operator()(const Arguments&... arguments) {
    return forward(arguments...);
  }

  Module& module() { return module_; }
  const Module& module() const { return module_; }

 private:
  using Inner = std::decay_t<decltype(*std::declval<Module&>())>;

  /// The first output's structure, each tensor joined with its counterparts in the other outputs.
  template <class Output>
  Output joined(const std::vector<std::optional<Output>>& outputs) const {
    std::vector<std::vector<at::Tensor>> tensors;
    tensors.reserve(outputs.size());
    for (const auto& output : outputs) tensors.push_back(parallel::tensors_in(*output));
    for (const auto& each : tensors)
      if (each.empty() || each.size() != tensors.front().size())
        throw DistError(
            "DataParallel: each copy's forward must give tensors, and as many as the others; they "
            "gave " +
            std::to_string(tensors.front().size()) + " and " + std::to_string(each.size()));
    std::size_t next = 0;
    const auto join = [&](const at::Tensor&) {
      std::vector<at::Tensor> parts;
      parts.reserve(tensors.size());
      for (const auto& each : tensors) parts.push_back(each[next]);
      ++next;
      return replicas_.joined(parts);
    };
    return parallel::map_tensors(*outputs.front(), join);
  }

  Module module_;
  parallel::ReplicaSet replicas_;
};

}  // namespace muster
