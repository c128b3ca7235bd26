/// What carries out requests: one implementation per kind in `backends/`.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "muster/base/clock.h"
#include "muster/base/status.h"
#include "muster/group/request.h"
#include "muster/group/work.h"

namespace muster {

namespace collective {
struct Args;      // communicator.h
class Meanwhile;  // communicator.h
}  // namespace collective

/// A request laid out once (`ProcessGroupBackend::prepare`). Its backend outlives it.
class PreparedCall {
 public:
  virtual ~PreparedCall() = default;
  virtual WorkRef start(TimePoint deadline, std::uint64_t sequence, trace::Mark mark) = 0;
};

/// Everything here is inline, so that a plugin needs no symbol of the program that loads it.
class ProcessGroupBackend {
 public:
  virtual ~ProcessGroupBackend() = default;

  /// Lower-case name that it was asked for by.
  virtual std::string_view name() const = 0;
  /// Whether it can do `op` on such tensors. On false, `why` says what is missing, as the end of a
  /// sentence.
  virtual bool supports(Op op, at::ScalarType dtype, c10::DeviceType device,
                        std::string* why) const = 0;
  /// Carries out a request that ProcessGroup::submit has checked. Synchronous ones are done on
  /// return and may give no Work; receives always give one.
  virtual WorkRef submit(Request request) = 0;

  /// Whether `run_plain` carries calls out.
  virtual bool takes_plain() const { return false; }
  /// A synchronous collective or message on memory of the CPU, done on return. `valid`: its slices
  /// are right in number and length, and apart. Tells `Meanwhile`, which knows the deadline, once
  /// it has begun, unless it throws before.
  virtual void run_plain(const collective::Args&, std::string_view /*name*/, bool /*valid*/,
                         collective::Meanwhile&) {}

  /// Lays out a request that ProcessGroup has checked, to be started often. Null: a copy of it is
  /// submitted each time.
  virtual std::unique_ptr<PreparedCall> prepare(Request) { return nullptr; }
  /// While what it returns lives, the caller's thread drives the calls that it starts: with
  /// `Work::is_completed` now and then, and by waiting for them in the end. Null: others had better
  /// do that, because the machine has cores to spare or a network moves the data.
  virtual std::shared_ptr<void> drive_here() { return nullptr; }
  /// While what it returns lives, small messages that the caller's thread sends travel together
  /// (`transport::SendBatch`, whose rules hold). Null: each goes by itself.
  virtual std::shared_ptr<void> send_together() { return nullptr; }
  /// Whether all members are on one host and read each other's memory, so that nothing need be
  /// copied of tensors in shared memory.
  virtual bool shares_memory() const { return false; }
  /// This member's next collective, an `op`, was refused: counts it and tells the other members
  /// (`ProcessGroup::refuse`). Never blocks. The default is for backends whose members cannot be
  /// told.
  virtual void refuse(Op) {}

  /// The group's failure, or success while it works.
  virtual Status failure() const = 0;
  /// Whether a call or a Work has shown that failure to the user: what nobody has seen is thrown
  /// when the group is destroyed. The default takes every failure for seen.
  virtual bool failure_was_shown() const { return true; }
  /// Orderly end, called by every member; finds calls that a member skipped.
  virtual Status close(TimePoint deadline) = 0;
  /// Ends everything in flight and tells the other members.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace muster
