// SPDX-License-Identifier: BSD-3-Clause
/// A call as torch's profilers show it.
#pragma once

#include <ATen/record_function.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "faces/compat/backward_calls.h"
#include "muster/process_group.h"
#include "muster/work.h"

namespace muster::compat {
/// "muster:all_reduce" and the shapes of `tensors`, from the call until it is done, on whatever
/// thread that shows. Thread-safe.
class CallRange {
 public:
  /// Null where no profiler looks.
  static std::shared_ptr<CallRange> begin(const std::string& backend, c10d::OpType type,
                                          const std::vector<at::Tensor>& tensors);
  explicit CallRange(at::StepCallbacks observers) : range_(std::move(observers)) {}
  ~CallRange() { end(); }
  CallRange(const CallRange&) = delete;
  CallRange& operator=(const CallRange&) = delete;

  /// Again: nothing.
  void end();

 private:
  at::RecordFunction range_;
  std::string title_;  // which the range only refers to
  std::function<void()> end_;
  std::once_flag ended_;
};

// A call of muster's as the Work that stock torch waits on.

/// Done when all of `works` are done; with an empty list, from the start. Errors are torch's
/// (torch_error.h). Thread-safe.
class TorchWork : public c10d::Work {
 public:
  struct Parts {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    std::vector<WorkRef> works;
    std::vector<at::Tensor> outputs;  ///< what the future gives
    std::size_t lists = 1;  ///< more: it gives the outputs as so many lists of the same length
    Group group;            ///< for the sender's rank
    std::uint64_t sequence = 0;
    Duration timeout{};
    std::weak_ptr<BackwardCalls> pass;  ///< in which it was called; else null
  };
  /// `shown` (null without a profiler) ends when the call is done, at the latest when a wait for it
  /// returns.
  static c10::intrusive_ptr<TorchWork> create(Parts parts, const std::shared_ptr<CallRange>& shown);
  TorchWork(Parts parts, std::shared_ptr<CallRange> shown);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return parts_.outputs; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return parts_.sequence; }
  // Newer than torch 2.6: no `override`.
  // NOLINTNEXTLINE(modernize-use-override)
  std::chrono::milliseconds getTimeout() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(parts_.timeout);
  }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future();
  c10::IValue value() const;

  const Parts parts_;
  const std::shared_ptr<CallRange> shown_;
  mutable std::mutex future_mutex_;  // guards future_; callbacks are added without it
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace muster::compat
