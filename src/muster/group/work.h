/// A started operation.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "muster/base/clock.h"

namespace c10::ivalue {
struct Future;  // <ATen/core/ivalue.h>, for those who use it
}

namespace muster {

/// Thread-safe. Tensors of the call must stay as they are until it is completed; the Work holds
/// them. It may be dropped: the operation goes on.
class Work {
 public:
  virtual ~Work() = default;

  /// Whether it has ended, well or badly. Never blocks.
  virtual bool is_completed() = 0;
  /// Whether it has ended well.
  virtual bool is_success() = 0;
  /// Returns true once it is completed; throws what it failed with. When `timeout` passes first,
  /// throws DistBackendError (Code::timed_out) and leaves the operation going. The operation has
  /// its own deadline, the group's timeout, in any case.
  virtual bool wait(std::optional<Duration> timeout = {}) = 0;
  /// Completed with the list of output tensors, or with the error. Its callbacks run on threads of
  /// their own (base/callback_executor.h), those of a group's collectives one after another; they
  /// may wait for other calls. Where it is asked for in a backward pass it is completed once the
  /// pass has made all its calls, or its thread waits for it.
  virtual c10::intrusive_ptr<c10::ivalue::Future> get_future() = 0;
  /// Receives, once completed: the rank of the default group that sent the message. -1 for other
  /// operations.
  virtual int source_rank() = 0;
  /// What it failed with; null while it has not.
  virtual std::exception_ptr exception() = 0;
  /// The output tensors.
  virtual std::vector<at::Tensor> result() = 0;
};
using WorkRef = std::shared_ptr<Work>;

}  // namespace muster
