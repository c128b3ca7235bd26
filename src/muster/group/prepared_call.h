/// A call that is checked and laid out once and made often, as MPI's persistent requests are.
#pragma once

#include <memory>
#include <utility>

#include "muster/group/call.h"

namespace muster {

/// `ProcessGroup::prepare` makes it. The tensors keep their memory as long as it lives. On the
/// native backend a synchronous call on contiguous tensors takes no memory of its own after the
/// first ones.
class PreparedCall {
 public:
  /// Of a process that is no member.
  PreparedCall() = default;
  PreparedCall(Group group, Call call)
      : group_(std::move(group)), call_(std::make_unique<Call>(std::move(call))) {}

  /// What ProcessGroup::submit does, but for the checks. One at a time: a Work that it returns is
  /// waited for before the next.
  WorkRef submit();

 private:
  Group group_;
  std::unique_ptr<Call> call_;
};

}  // namespace muster
