/// The contract for a backend, which carries out a group's calls. muster's own backends are in
/// `backends/`; others are registered (`backend_registry.h`).
///
/// Threads: the group calls a backend from any number of threads at once. Every call it submits has
/// passed its checks (`Call`), except refused calls.
///
/// Order: collectives must complete in the order they were submitted. Point-to-point messages may
/// overtake collectives.
///
/// Ownership: the group holds its backends until it is destroyed, with or without a prior `close`.
/// A Work may outlive the group and the backend and must hold whatever it needs. A `Call` belongs
/// to the caller: a backend copies or moves out what it needs after `submit` returns. A prepared
/// call is submitted repeatedly, so a backend with `takes_memory` must not modify a synchronous
/// call, except a receive from any rank.
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

/// Fixed properties of a backend.
struct BackendCapabilities {
  /// The name the backend was requested by, in lower case. The backend owns the memory.
  std::string_view name = {};
  /// True: the backend takes dense CPU memory as spans (`Call::args`), holds tensors only if a call
  /// outlives `submit`, and numbers, records and times its calls itself (`collective::CallRecord`).
  /// False: every call arrives with its tensors and already numbered; it is recorded as finished
  /// when `submit` returns null or when the returned Work ends.
  bool takes_memory = false;
  bool scaled_sums = false;  ///< supports AVG and PREMUL_SUM
  /// All members are on one host and read each other's memory, so tensors in shared memory are not
  /// copied.
  bool shares_memory = false;
};

/// The outcome of a backend's calls so far.
struct BackendState {
  Status failure = {};  ///< why the group is unusable; ok while it is usable
  /// Whether a call or a Work has shown `failure` to the user. Otherwise destroying the group
  /// throws it.
  bool failure_was_shown = true;
  std::uint64_t collectives = 0;  ///< submitted so far, if the backend numbers them
};

/// Declarations about the calling thread that a backend may exploit.
enum class BackendScope : std::uint8_t {
  /// The thread makes progress on the calls it starts: it polls `Work::is_completed` from time to
  /// time and eventually waits for each.
  drive_here,
  /// Small messages the thread sends are coalesced; the rules of `transport::SendBatch` apply.
  send_together,
};

/// Entirely inline, so that a plugin needs no symbol of the program that loads it.
class ProcessGroupBackend {
 public:
  virtual ~ProcessGroupBackend() = default;

  /// Called for every submitted call; must only return a stored value.
  virtual const BackendCapabilities& capabilities() const = 0;
  /// Whether the backend supports `op` on such tensors. On false, sets `*why` to what is missing,
  /// phrased as the end of a sentence.
  virtual bool supports(Op op, at::ScalarType dtype, c10::DeviceType device,
                        std::string* why) const = 0;
  /// Carries out one call. A synchronous call is complete on return and may return null; a receive
  /// from any rank always returns a Work. Failures are thrown, with the ranks at fault. The call's
  /// timeout (`Call::record`) must be honoured. If `Call::is_refused`, this member could not make
  /// the call: the backend counts it, tells the members that would wait for it, and never blocks.
  virtual WorkRef submit(Call& call) = 0;
  /// Starts a scope on the calling thread. It ends when the returned object is destroyed, on the
  /// same thread. Null if the backend does not use it.
  virtual std::shared_ptr<void> scope(BackendScope kind) = 0;

  /// Never blocks.
  virtual BackendState state() const = 0;
  /// Orderly shutdown, called once by every member: waits for calls in flight and detects calls
  /// that some member skipped. Returns by the deadline.
  virtual Status close(TimePoint deadline) = 0;
  /// Fails everything in flight with `reason`, tells the other members, and makes every later call
  /// fail. May be called from any thread, also during `submit` or `close`; never blocks.
  virtual void abort(const std::string& reason) = 0;
};

}  // namespace muster
