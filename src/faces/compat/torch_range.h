/// A call as torch's profilers show it.
#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

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

}  // namespace muster::compat
