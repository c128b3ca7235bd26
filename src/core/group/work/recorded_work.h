// SPDX-License-Identifier: BSD-3-Clause
/// A Work that records the end of an asynchronous call, for backends that record nothing.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/trace/recorder.h"
#include "muster/work.h"

namespace muster::group {

/// Forwards to the backend's Work. Records the call's end when it is first observed by `wait`, a
/// query or the future; if the Work is dropped earlier, then.
class RecordedWork final : public Work, public std::enable_shared_from_this<RecordedWork> {
 public:
  RecordedWork(WorkRef work, trace::Mark mark) : work_(std::move(work)), mark_(std::move(mark)) {}

  bool is_completed() override;
  bool is_success() override;
  bool wait(std::optional<Duration> timeout = {}) override;
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override;
  int source_rank() override { return work_->source_rank(); }
  std::exception_ptr exception() override;
  std::vector<at::Tensor> result() override { return work_->result(); }

 private:
  /// Null: the call succeeded.
  void record(const std::exception_ptr& error);

  const WorkRef work_;
  std::mutex mutex_;
  trace::Mark mark_;  // under mutex_
};

}  // namespace muster::group
