// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/tensor_class.h"

#include <atomic>

namespace muster::group {
namespace {

std::atomic<ForeignClass> describe_class = nullptr;

}  // namespace

void set_foreign_class(ForeignClass describe) { describe_class = describe; }

std::string foreign_class_of(const at::Tensor& tensor) {
  const ForeignClass describe = describe_class;
  if (describe == nullptr || !tensor.defined() || !tensor.key_set().has(c10::DispatchKey::Python))
    return {};
  return describe(tensor);
}

}  // namespace muster::group
