/// A call that is checked and laid out once and made often, as MPI's persistent requests are.
#pragma once

#include <memory>
#include <utility>

#include "muster/group/call.h"

namespace muster {

/// `ProcessGroup::prepare` makes it, and it holds the tensors. Each must keep its storage and its
/// shape as long as it lives (no `set_`, no `resize_`): its memory is looked up once. On the native
/// backend a synchronous call on contiguous tensors takes no memory of its own after the
/// first ones.
class PreparedCall {
 public:
  /// Of a process that is no member.
  PreparedCall() = default;
  /// `stays`: submitting the call leaves it as it was.
  PreparedCall(Group group, Call call, bool stays)
      : group_(std::move(group)), call_(std::make_unique<Call>(std::move(call))), stays_(stays) {}

  /// What ProcessGroup::submit does, but for the checks. One at a time: a Work that it returns is
  /// waited for before the next.
  WorkRef submit();

 private:
  Group group_;
  std::unique_ptr<Call> call_;
  bool stays_ = false;
};

}  // namespace muster
