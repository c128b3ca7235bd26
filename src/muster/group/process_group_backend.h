/// What carries out the calls of a group: the contract that an author of a backend reads. One
/// implementation for each kind in `backends/`; others are registered (`backend_registry.h`).
///
/// Who calls it: the group, with calls that it has checked (`Call`), from any number of threads at
/// once. Collectives must end in the order in which they were submitted; messages may overtake
/// them. Ownership: the group holds its backends until it ends, after `close` or without it; Works
/// may outlive both and must hold what they need. A `Call` is the caller's: what a backend needs of
/// it after `submit` has returned, it copies or moves out. A backend that takes memory leaves a
/// synchronous call as it is, unless that is a receive from any rank: it may be prepared, and come
/// again.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "muster/base/clock.h"
#include "muster/base/status.h"
#include "muster/collective/op.h"
#include "muster/group/work.h"

namespace muster {

using collective::Op;
class Call;  // call.h

/// What a backend has. The same for as long as it lives.
struct BackendCapabilities {
  std::string_view name = {};  ///< lower-case, that it was asked for by; the backend's own memory
  /// It takes calls on dense memory of the CPU as spans (`Call::args`), holds tensors only where a
  /// call goes on after `submit`, and numbers, records and times its calls itself
  /// (`collective::CallRecord`). False: every call comes with its tensors, and started; it is
  /// recorded as over once `submit` has returned no Work, or the Work that it returned has ended.
  bool takes_memory = false;
  bool scaled_sums = false;  ///< AVG and PREMUL_SUM
  /// All members are on one host and read each other's memory, so that nothing need be copied of
  /// tensors in shared memory.
  bool shares_memory = false;
};

/// How its calls have gone so far.
struct BackendState {
  Status failure = {};  ///< why the group can no longer be used; success while it can
  /// Whether a call or a Work has shown that to the user: what nobody has seen is thrown when the
  /// group is destroyed.
  bool failure_was_shown = true;
  std::uint64_t collectives = 0;  ///< made so far, where it numbers them itself
};

/// Stretches of the caller's thread that a backend may make use of.
enum class BackendScope : std::uint8_t {
  /// The thread drives the calls that it starts: by `Work::is_completed` now and then, and by
  /// waiting for them in the end.
  drive_here,
  /// Small messages that the thread sends travel together (`transport::SendBatch`, whose rules
  /// hold).
  send_together,
};

/// Everything here is inline, so that a plugin needs no symbol of the program that loads it.
class ProcessGroupBackend {
 public:
  virtual ~ProcessGroupBackend() = default;

  /// Asked in every call: it costs no more than to return what is there.
  virtual const BackendCapabilities& capabilities() const = 0;
  /// Whether it can do `op` on such tensors. On false, `why` says what is missing, as the end of a
  /// sentence.
  virtual bool supports(Op op, at::ScalarType dtype, c10::DeviceType device,
                        std::string* why) const = 0;
  /// Carries out one call. Synchronous ones are done on return and may give no Work; a receive from
  /// any rank always gives one. What has failed is thrown, with the ranks at fault; the deadline
  /// (`Call::record`) is kept. A call that is refused (`Call::is_refused`) is one that this member
  /// could not make: it counts, and is told to the other members where they would wait for it; it
  /// never blocks.
  virtual WorkRef submit(Call& call) = 0;
  /// Begins such a stretch, which ends with what is returned, on the same thread; null where it
  /// makes no difference here.
  virtual std::shared_ptr<void> scope(BackendScope kind) = 0;

  /// Never blocks.
  virtual BackendState state() const = 0;
  /// Orderly end, called by every member, once: what is in flight ends, and calls that a member
  /// has skipped are found. Back by the deadline.
  virtual Status close(TimePoint deadline) = 0;
  /// Ends everything in flight with an error that gives the reason, tells the other members, and
  /// makes every later call fail. From any thread, also while others are in `submit` or `close`;
  /// never blocks.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace muster
