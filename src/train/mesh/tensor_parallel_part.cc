// SPDX-License-Identifier: BSD-3-Clause
// Which parameters are parts of whole tensors: see muster/device_mesh.h.
#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/group/errors.h"
#include "muster/device_mesh.h"

namespace muster {
namespace {

std::string text_of(at::IntArrayRef sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes)
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

/// By tensor. A weak reference keeps the address from being used again.
class PartTable {
 public:
  void put(const at::Tensor& parameter, TensorParallelPart part) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return entry.second.of.expired(); });
    const std::weak_ptr<ProcessGroup> group = std::exchange(part.group, nullptr);
    entries_.insert_or_assign(
        parameter.unsafeGetTensorImpl(),
        DeclaredPart{WeakTensor(parameter.getIntrusivePtr()), std::move(part), group});
  }
  std::optional<TensorParallelPart> find(const at::Tensor& parameter) const {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(parameter.unsafeGetTensorImpl());
    if (found == entries_.end()) return {};
    TensorParallelPart part = found->second.part;
    part.group = found->second.group.lock();
    return part;
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct DeclaredPart {
    WeakTensor of;
    TensorParallelPart part;
    std::weak_ptr<ProcessGroup> group;  // the table does not keep it alive
  };
  mutable std::mutex mutex_;
  std::unordered_map<const void*, DeclaredPart> entries_;
};

PartTable& parts() {
  static auto* table = new PartTable;  // outlives parameters of static storage duration
  return *table;
}

}  // namespace

std::optional<TensorParallelPart> tensor_parallel_part(const at::Tensor& parameter) {
  return parts().find(parameter);
}

void set_tensor_parallel_part(const at::Tensor& parameter, TensorParallelPart part) {
  const auto sizes = parameter.sizes();
  bool within = part.sizes.size() == sizes.size() && part.offsets.size() == sizes.size();
  for (std::size_t i = 0; within && i < sizes.size(); ++i)
    within = part.offsets[i] >= 0 && part.offsets[i] <= part.sizes[i] - sizes[i];
  if (!within)
    group::invalid("set_tensor_parallel_part: the parameter is " + text_of(sizes) + " at " +
                   text_of(part.offsets) + ", which is no part of " + text_of(part.sizes));
  parts().put(parameter, std::move(part));
}

}  // namespace muster
