#include "muster/collective/closing.h"

#include "muster/collective/agreement.h"
#include "muster/collective/call.h"

namespace muster::collective {

Status CommunicatorClose::run(TimePoint deadline) {
  Status status = drain(deadline);
  if (status.ok() && group_.size() > 1) status = agree_to_close(deadline);
  closed_.cancel_receives("its group has been closed");
  return status;
}

Status CommunicatorClose::fail_timed_out(const std::vector<int>& missing, const char* what) {
  group_.channel->fail(
      Status(Code::timed_out,
             "rank " + std::to_string(group_.job_rank()) + " closes " + group_.text() +
                 " and waited for " + describe_ranks(missing) + " " + what +
                 (group_.peer_traces ? group_.peer_traces->tell(group_.name, missing) : "") +
                 "; check whether they are still in a call",
             missing));
  return group_.channel->failure();
}

Status CommunicatorClose::drain(TimePoint deadline) {
  const bool drained = driver_.drive_until([this] { return closed_.is_drained(); }, deadline);
  if (!drained) {
    group_.channel->fail(Status(Code::timed_out,
                                "rank " + std::to_string(group_.job_rank()) + " closes " +
                                    group_.text() +
                                    " while calls or messages are outstanding that did not end in "
                                    "time; wait for them before closing",
                                {group_.job_rank()}));
    driver_.drive_until([this] { return closed_.is_drained(); }, TimePoint::max());
  }
  return group_.channel->failure();
}

Status CommunicatorClose::close_as_first(TimePoint deadline) {
  std::vector<int> missing;
  const auto all_close = [&] {
    closed_.with_control([&](Control& control) { missing = control.not_closing(); });
    // A rank whose process has ended reports no more. It made all calls that needed it.
    if (group_.channel->someone_left())
      std::erase_if(missing, [this](int rank) { return !group_.fabric->gone(rank).ok(); });
    return missing.empty() || group_.channel->failed();
  };
  missing = {-1};
  if (!driver_.drive_until(all_close, deadline)) return fail_timed_out(missing, "to close it too");
  if (group_.channel->failed()) return group_.channel->failure();
  Status same;
  with_control([&](Control& control) {
    same = control.compare_reports();
    if (same.ok()) control.release_all();
  });
  if (!same.ok()) {
    group_.channel->fail(same);
    return group_.channel->failure();
  }
  bool sent = false;
  driver_.drive_until(
      [&] {
        closed_.with_control([&](Control& control) { sent = control.all_sent(); });
        return sent || group_.channel->failed();
      },
      deadline);
  return group_.channel->failure();
}

Status CommunicatorClose::agree_to_close(TimePoint deadline) {
  with_control([](Control& control) { control.report_closing(); });
  if (group_.rank() == 0) return close_as_first(deadline);
  bool released = false;
  const auto may_leave = [&] {
    closed_.with_control([&](Control& control) { released = control.released(); });
    return released || group_.channel->failed() ||
           (group_.channel->someone_left() && !group_.fabric->gone(group_.job_rank_of(0)).ok());
  };
  // The first member knows which members are missing: give it time to report them.
  const TimePoint limit =
      deadline < TimePoint::max() - kVerdictGrace ? deadline + kVerdictGrace : deadline;
  if (!driver_.drive_until(may_leave, limit))
    return fail_timed_out({group_.job_rank_of(0)},
                          "to collect all reports and release the other members");
  return group_.channel->failure();
}

}  // namespace muster::collective
