// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/queue/closing.h"

#include <chrono>

#include "core/base/log/log.h"
#include "core/collective/call.h"
#include "core/collective/creation/group_creation.h"

namespace muster::collective {
namespace {

constexpr Duration kWait = std::chrono::seconds(5);                // limit: patience
constexpr Duration kWaitAgain = std::chrono::milliseconds(200);    // limit: patience
constexpr Duration kMissedCounts = std::chrono::seconds(2);        // limit: patience
constexpr Duration kFirstsGrace = std::chrono::milliseconds(500);  // limit: delay of a note
constexpr Duration kFlush = std::chrono::seconds(1);               // limit: patience

}  // namespace

Status CommunicatorClose::run(TimePoint deadline) {
  Status status = drain(deadline);
  if (group_.size() == 1) all_closed_ = true;
  if (status.ok() && group_.size() > 1) status = agree_to_close();
  closed_.cancel_receives("its group has been closed");
  return status;
}

/// Until when to wait for the other members. If they did not come to close another group just now,
/// they are probably busy elsewhere.
TimePoint CommunicatorClose::limit() const {
  const TimePoint now = group_.now();
  const bool missed = now - fabric_state_of(*group_.fabric)->close_missed.load() < kMissedCounts;
  return now + (missed ? kWaitAgain : kWait);
}

Status CommunicatorClose::leave(const std::vector<int>& missing) {
  fabric_state_of(*group_.fabric)->close_missed.store(group_.now());
  log(LogLevel::warning,
      "rank " + std::to_string(group_.job_rank()) + " has destroyed " + group_.text() +
          " alone: it waited " + describe(group_.now() - begin_) + " for " +
          describe_ranks(missing) + " to destroy it too" +
          (group_.peer_traces ? group_.peer_traces->tell(group_.name, missing) : "") +
          "; their calls on it will fail");
  with_control([](Control& control) { control.report_left(); });
  flush_notes();
  return group_.channel->failure();
}

/// Notes that do not get out are no error: their receivers learn the same from the end of this
/// rank.
void CommunicatorClose::flush_notes() {
  bool sent = false;
  driver_.drive_until(
      [&] {
        closed_.with_control([&](Control& control) { sent = control.all_sent(); });
        return sent || group_.channel->failed();
      },
      group_.now() + kFlush);
}

Status CommunicatorClose::fail_if_different() {
  Status same;
  with_control([&](Control& control) { same = control.compare_reports(); });
  if (!same.ok()) group_.channel->fail(same);
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

Status CommunicatorClose::close_as_first() {
  std::vector<int> missing{-1};
  const auto all_close = [&] {
    closed_.with_control([&](Control& control) { missing = control.not_closing(); });
    // A rank whose process has ended reports no more. It made all calls that needed it.
    if (group_.channel->someone_left())
      std::erase_if(missing, [this](int rank) { return !group_.fabric->gone(rank).ok(); });
    return missing.empty() || group_.channel->failed();
  };
  const bool all = driver_.drive_until(all_close, limit());
  if (Status same = fail_if_different(); !same) return same;
  if (!all) return leave(missing);
  with_control([](Control& control) { control.release_all(); });
  flush_notes();
  all_closed_ = group_.channel->failure().ok();
  return group_.channel->failure();
}

Status CommunicatorClose::agree_to_close() {
  with_control([](Control& control) { control.report_closing(); });
  if (group_.rank() == 0) return close_as_first();
  bool released = false, first_left = false;
  const auto may_leave = [&] {
    closed_.with_control([&](Control& control) {
      released = control.released();
      first_left = control.first_left();
    });
    return released || group_.channel->failed() ||
           (group_.channel->someone_left() && !group_.fabric->gone(group_.job_rank_of(0)).ok());
  };
  // The first member knows which members are missing, and releases this one when it gives up.
  if (!driver_.drive_until(may_leave, limit() + kFirstsGrace))
    return leave({group_.job_rank_of(0)});
  if (first_left) return fail_if_different();
  all_closed_ = released;
  return group_.channel->failure();
}

}  // namespace muster::collective
