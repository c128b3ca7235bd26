// SPDX-License-Identifier: BSD-3-Clause
/// A Work that is complete from the start, for calls that have finished when they return.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "muster/work.h"

namespace muster::group {

class FinishedWork final : public Work {
 public:
  explicit FinishedWork(TensorList tensors) : tensors_(std::move(tensors)) {}
  bool is_completed() override { return true; }
  bool is_success() override { return true; }
  bool wait(std::optional<Duration>) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override;
  int source_rank() override { return -1; }
  std::exception_ptr exception() override { return nullptr; }
  std::vector<at::Tensor> result() override { return tensors_; }

 private:
  const TensorList tensors_;
};

}  // namespace muster::group
