/// The orderly end of a communicator: outstanding calls complete, then all members compare how many
/// calls they have made. The first member collects the counts and releases the others.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "muster/collective/control.h"
#include "muster/collective/driver.h"
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

  /// Returns the group's failure if there is one, including a member that is missing or has skipped
  /// a call.
  Status run(TimePoint deadline);

 private:
  Status drain(TimePoint deadline);
  Status agree_to_close(TimePoint deadline);
  Status close_as_first(TimePoint deadline);
  Status fail_timed_out(const std::vector<int>& missing, const char* what);
  /// Runs `work(control)` under the drive lock and returns when it is done.
  template <class Work>
  void with_control(Work work) {
    driver_.drive_until([&] { return closed_.with_control(work); }, TimePoint::max());
  }

  const GroupContext& group_;
  Driver& driver_;
  Closable& closed_;
};

}  // namespace muster::collective
