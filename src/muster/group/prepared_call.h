/// A call that is checked once and submitted repeatedly, like MPI's persistent requests.
#pragma once

#include <memory>
#include <utility>

#include "muster/group/call.h"

namespace muster {

/// Made by `ProcessGroup::prepare`; holds the tensors. Each tensor must keep its storage and shape
/// (no `set_`, no `resize_`), because its memory is looked up only once. On the native backend,
/// repeated synchronous calls on contiguous tensors allocate no memory.
class PreparedCall {
 public:
  /// For a non-member.
  PreparedCall() = default;
  /// `stays`: submitting does not modify the call.
  PreparedCall(Group group, Call call, bool stays)
      : group_(std::move(group)), call_(std::make_unique<Call>(std::move(call))), stays_(stays) {}

  /// As ProcessGroup::submit, without the checks. Wait for a returned Work before the next submit.
  WorkRef submit();

 private:
  Group group_;
  std::unique_ptr<Call> call_;
  bool stays_ = false;
};

}  // namespace muster
