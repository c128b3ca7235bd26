// SPDX-License-Identifier: BSD-3-Clause
/// Shared by the wrappers of modules (DistributedDataParallel, FullyShardedDataParallel): mixed
/// precision, no_sync, and the tensors inside the arguments and results of a forward.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster {

/// Modelled on torch's _MixedPrecision for DistributedDataParallel. An empty option leaves the
/// dtype unchanged. Only floating-point tensors are cast.
struct MixedPrecision {
  /// Dtype of parameters from forward to the end of backward, and of forward's inputs.
  std::optional<at::ScalarType> param_dtype = {};
  /// Dtype in which gradients are reduced; default: param_dtype.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Dtype of buffers from construction on.
  std::optional<at::ScalarType> buffer_dtype = {};
  /// Gradients stay in param_dtype after backward.
  bool keep_low_precision_grads = false;
  /// Cast floating-point tensors among forward's arguments to param_dtype.
  bool cast_forward_inputs = true;
};

namespace parallel {

/// While it lives, backward accumulates gradients on this rank only. `Core` has require_sync() and
/// set_require_sync(bool) and outlives it.
template <class Core>
class NoSync {
 public:
  explicit NoSync(Core& core) : core_(core), before_(core.require_sync()) {
    core.set_require_sync(false);
  }
  ~NoSync() { core_.set_require_sync(before_); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Core& core_;
  const bool before_;
};

/// Appends the tensors inside a forward's result to `found`. For your own type, overload it in that
/// type's namespace.
inline void collect_tensors(const at::Tensor& tensor, std::vector<at::Tensor>& found) {
  found.push_back(tensor);
}
template <class T>
requires std::is_arithmetic_v<T>
void collect_tensors(const T&, std::vector<at::Tensor>&) {}
template <class A, class B>
void collect_tensors(const std::pair<A, B>& pair, std::vector<at::Tensor>& found);
template <class... T>
void collect_tensors(const std::tuple<T...>& tuple, std::vector<at::Tensor>& found);
template <class T>
void collect_tensors(const std::optional<T>& value, std::vector<at::Tensor>& found);
template <class T>
void collect_tensors(const std::vector<T>& list, std::vector<at::Tensor>& found);
template <class T, std::size_t N>
void collect_tensors(const std::array<T, N>& list, std::vector<at::Tensor>& found);
template <class K, class T>
void collect_tensors(const std::map<K, T>& map, std::vector<at::Tensor>& found);

template <class A, class B>
void collect_tensors(const std::pair<A, B>& pair, std::vector<at::Tensor>& found) {
  collect_tensors(pair.first, found);
  collect_tensors(pair.second, found);
}
template <class... T>
void collect_tensors(const std::tuple<T...>& tuple, std::vector<at::Tensor>& found) {
  std::apply([&](const auto&... each) { (collect_tensors(each, found), ...); }, tuple);
}
template <class T>
void collect_tensors(const std::optional<T>& value, std::vector<at::Tensor>& found) {
  if (value) collect_tensors(*value, found);
}
template <class T>
void collect_tensors(const std::vector<T>& list, std::vector<at::Tensor>& found) {
  for (const auto& each : list) collect_tensors(each, found);
}
template <class T, std::size_t N>
void collect_tensors(const std::array<T, N>& list, std::vector<at::Tensor>& found) {
  for (const auto& each : list) collect_tensors(each, found);
}
template <class K, class T>
void collect_tensors(const std::map<K, T>& map, std::vector<at::Tensor>& found) {
  for (const auto& [key, each] : map) collect_tensors(each, found);
}

/// Whether values of type T can contain tensors that `replace_tensors` finds.
template <class T>
inline constexpr bool holds_tensors = std::is_same_v<T, at::Tensor>;
template <class A, class B>
inline constexpr bool holds_tensors<std::pair<A, B>> = holds_tensors<A> || holds_tensors<B>;
template <class... T>
inline constexpr bool holds_tensors<std::tuple<T...>> = (holds_tensors<T> || ...);
template <class T>
inline constexpr bool holds_tensors<std::optional<T>> = holds_tensors<T>;
template <class T>
inline constexpr bool holds_tensors<std::vector<T>> = holds_tensors<T>;
template <class T, std::size_t N>
inline constexpr bool holds_tensors<std::array<T, N>> = holds_tensors<T>;
template <class K, class T>
inline constexpr bool holds_tensors<std::map<K, T>> = holds_tensors<T>;

using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

/// Replaces each tensor t inside `value` by `replacement(t)`. Does nothing for types that contain
/// none.
template <class T>
void replace_tensors(T& value, const TensorMap& replacement) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (value.defined()) value = replacement(value);
  } else if constexpr (!holds_tensors<T>) {
    return;
  } else if constexpr (requires { value.has_value(); }) {
    if (value) replace_tensors(*value, replacement);
  } else if constexpr (requires { typename T::mapped_type; }) {
    for (auto& [key, each] : value) replace_tensors(each, replacement);
  } else if constexpr (requires { value.begin(); }) {
    for (auto& each : value) replace_tensors(each, replacement);
  } else {
    std::apply([&](auto&... each) { (replace_tensors(each, replacement), ...); }, value);
  }
}

}  // namespace parallel
}  // namespace muster
