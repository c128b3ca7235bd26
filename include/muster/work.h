// SPDX-License-Identifier: BSD-3-Clause
/// A handle to a started operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "muster/clock.h"

namespace c10::ivalue {
struct Future;  // <ATen/core/ivalue.h>; include it to use futures
}

namespace muster {

using TensorList = std::vector<at::Tensor>;

/// Thread-safe. The call's tensors must not be modified until it has completed; the Work keeps them
/// alive. Dropping a Work does not cancel the operation.
class Work {
 public:
  virtual ~Work() = default;

  /// True once the operation has succeeded or failed. Never blocks.
  virtual bool is_completed() = 0;
  /// True once the operation has succeeded. Never blocks.
  virtual bool is_success() = 0;
  /// Blocks until the operation completes. Returns true, or throws the operation's error. If
  /// `timeout` expires first, throws DistBackendError (Code::timed_out); the operation goes on. The
  /// operation's own timeout applies in any case.
  virtual bool wait(std::optional<Duration> timeout = {}) = 0;
  /// A future that completes with the list of output tensors, or with the error. Its callbacks run
  /// on dedicated threads (core/wait/callbacks.h) and may wait for other calls;
  /// callbacks of one group's collectives run one at a time. A future requested during a backward
  /// pass completes once the pass has made all its calls, or once the pass's thread waits for it.
  virtual c10::intrusive_ptr<c10::ivalue::Future> get_future() = 0;
  /// For a completed receive: the sender's rank in the default group. -1 for other operations.
  virtual int source_rank() = 0;
  /// The operation's error; null if it has not failed.
  virtual std::exception_ptr exception() = 0;
  /// The output tensors.
  virtual std::vector<at::Tensor> result() = 0;
};
using WorkRef = std::shared_ptr<Work>;

}  // namespace muster
