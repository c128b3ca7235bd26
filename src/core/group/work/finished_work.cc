// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/work/finished_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

namespace muster::group {

c10::intrusive_ptr<c10::ivalue::Future> FinishedWork::get_future() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  future->markCompleted(c10::IValue(tensors_));
  return future;
}

}  // namespace muster::group
