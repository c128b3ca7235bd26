// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/work/finished_work.h"

#include <ATen/core/jit_type.h>

#include <utility>

namespace muster::group {
namespace {

/// The accelerators that hold some of the tensors. A future takes no tensors of other devices.
std::vector<c10::Device> accelerators_of(const TensorList& tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors)
    if (!tensor.is_cpu()) devices.push_back(tensor.device());
  return devices;
}

}  // namespace

FinishedWork::FinishedWork(TensorList tensors)
    : tensors_(std::move(tensors)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), accelerators_of(tensors_))) {
  future_->markCompleted(c10::IValue(tensors_));
}

bool FinishedWork::wait(std::optional<Duration>) {
  future_->waitAndThrow();
  return true;
}

}  // namespace muster::group
