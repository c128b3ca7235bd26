// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/queue/queued_communicator.h"

#include "core/collective/call.h"
#include "core/collective/completion.h"

namespace muster::collective {

Status QueuedCommunicator::check(const Args& args, std::string_view in_child) const {
  if (is_over()) {  // no text is made for a call that is allowed
    const std::string called = std::string(info(args.op).name) + " was called on " + group_.here();
    return Status(Code::aborted, mark_.forked()
                                     ? called + " by a forked child" + std::string(in_child)
                                     : called + ", which has been closed; make a new group");
  }
  if (args.checked) return {};
  Status valid = validate(args, rank(), size());
  return valid.ok() ? valid : valid.with_context(group_.here());
}

PendingRef QueuedCommunicator::fail_start(Op op, const Status& why) {
  group_.channel->fail(Status(why.code(),
                              "rank " + std::to_string(group_.job_rank()) +
                                  " could not make its call of " + std::string(info(op).name) +
                                  " in " + group_.text() + ": " + why.message(),
                              {group_.job_rank()}));
  group_.fabric->wake();
  return std::make_shared<Finished>(group_.channel->failure());
}

void QueuedCommunicator::fail_by_abort(const std::string& reason) {
  group_.channel->fail(Status(
      Code::aborted,
      "rank " + std::to_string(group_.job_rank()) + " aborted " + group_.text() + ": " + reason,
      {group_.job_rank()}));
  group_.fabric->wake();
}

}  // namespace muster::collective
