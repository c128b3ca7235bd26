// SPDX-License-Identifier: BSD-3-Clause
/// A Work that is complete from the start, for calls that have finished when they return.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

#include "muster/work.h"

namespace muster::group {

/// Construct it on the streams on which the call has enqueued its results.
class FinishedWork final : public Work {
 public:
  explicit FinishedWork(TensorList tensors);
  bool is_completed() override { return true; }
  bool is_success() override { return true; }
  /// Makes the current streams wait for the results.
  bool wait(std::optional<Duration>) override;
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override { return future_; }
  int source_rank() override { return -1; }
  std::exception_ptr exception() override { return nullptr; }
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  const TensorList tensors_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace muster::group
