// Which parameters are parts of whole tensors.

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "core/group/errors.h"
#include "muster/tensor_parallel.h"
#include "train/tensor/division.h"

namespace muster {
namespace {

/// By tensor. A weak reference keeps the address from being used again.
class PartTable {
 public:
  void put(const at::Tensor& parameter, TensorParallelPart part) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return entry.second.of.expired(); });
    entries_.insert_or_assign(
        parameter.unsafeGetTensorImpl(),
        DeclaredPart{WeakTensor(parameter.getIntrusivePtr()), std::move(part)});
  }
  std::optional<TensorParallelPart> find(const at::Tensor& parameter) const {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(parameter.unsafeGetTensorImpl());
    if (found == entries_.end()) return {};
    return found->second.part;
  }

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct DeclaredPart {
    WeakTensor of;
    TensorParallelPart part;
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
    group::invalid("set_tensor_parallel_part: the parameter is " + tensor_parallel::text_of(sizes) +
                   " at " + tensor_parallel::text_of(part.offsets) + ", which is no part of " +
                   tensor_parallel::text_of(part.sizes));
  parts().put(parameter, std::move(part));
}

}  // namespace muster
