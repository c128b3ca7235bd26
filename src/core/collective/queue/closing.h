// SPDX-License-Identifier: BSD-3-Clause
/// The orderly end of a communicator: outstanding calls complete, then all members compare how many
/// calls they have made. The first member collects the counts and releases the others.
///
/// A member may destroy a group long before another does, or two members two groups in different
/// orders. So a member waits for the others for some seconds only. After that it warns, tells them
/// that it has left, and is done: calls that need it fail with that reason, and a member that
/// closes later compares its calls with the first member's by itself.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/collective/control.h"
#include "core/collective/queue/driver.h"
#include "muster/status.h"

namespace muster::collective {

/// A communicator that is being closed.
class Closable {
 public:
  /// No collective and no send is outstanding.
  virtual bool is_drained() = 0;
  /// Calls `work(control)` under the drive lock, after the notes that have come. Returns false
  /// without calling it if another thread holds the lock.
  virtual bool with_control(const std::function<void(Control&)>& work) = 0;
  virtual void cancel_receives(const std::string& why) = 0;

 protected:
  ~Closable() = default;
};

/// Used by the closing thread only.
class CommunicatorClose {
 public:
  CommunicatorClose(const GroupContext& group, Driver& driver, Closable& closed)
      : group_(group), driver_(driver), closed_(closed) {}

  /// Returns the group's failure if there is one, including a member that has skipped a call.
  /// Outstanding calls may take until `deadline`.
  Status run(TimePoint deadline);
  /// Whether all members have closed the group: none of them uses its memory any more.
  bool all_closed() const { return all_closed_; }

 private:
  Status drain(TimePoint deadline);
  Status agree_to_close();
  Status close_as_first();
  TimePoint limit() const;
  Status leave(const std::vector<int>& missing);
  Status fail_if_different();
  void flush_notes();
  /// Runs `work(control)` under the drive lock and returns when it is done.
  template <class Work>
  void with_control(Work work) {
    driver_.drive_until([&] { return closed_.with_control(work); }, TimePoint::max());
  }

  const GroupContext& group_;
  Driver& driver_;
  Closable& closed_;
  const TimePoint begin_ = group_.now();
  bool all_closed_ = false;
};

}  // namespace muster::collective
