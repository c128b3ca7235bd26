// SPDX-License-Identifier: BSD-3-Clause
/// The one class behind `ProcessGroup`, and the single entry point to a group's backends.
///
/// `group/` holds everything that users of the C++ interface touch, on LibTorch tensors;
/// `muster/distributed.h` includes it. A call takes this path: a function of `collectives.h` or
/// `point_to_point.h` builds and checks one `Call`; `GroupCore::submit` picks a
/// `ProcessGroupBackend` by the tensors' device; the native backend passes the call's memory to
/// `collective::Communicator`, which numbers, records and times it. `group/` may include every
/// layer below it. Its tests: `ctest -R '^group'`.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/trace/recorder.h"
#include "muster/backend.h"
#include "muster/backend_name.h"
#include "muster/key_value_store.h"
#include "muster/process_group.h"
#include "muster/work.h"

namespace at {
struct StepCallbacks;  // <ATen/record_function.h>
}

namespace muster {

namespace collective {
struct Lineage;  // survivors.h
}

/// Everything that a group is constructed from.
struct ProcessGroupParts {
  std::string name;
  std::vector<int> ranks;  ///< ranks of the default group, in group order
  /// The members' names in errors and traces: their ranks in the default group before any
  /// shrinking. Empty: same as `ranks`.
  std::vector<int> first_ranks = {};
  int rank = -1;  ///< this process's index in `ranks`; -1: not a member
  BackendConfig config;
  Duration timeout = std::chrono::minutes(30);
  /// The job's store, while the job lives. Members publish their side of a mismatch there
  /// (`debug_detail.h`).
  std::weak_ptr<store::Store> store = {};
  /// The backend of each device type; empty on a non-member.
  std::vector<std::pair<c10::DeviceType, std::shared_ptr<ProcessGroupBackend>>> backends;
  /// Set if this group was made by shrinking another.
  std::shared_ptr<const collective::Lineage> lineage = nullptr;
  std::shared_ptr<trace::Recorder> recorder = {};  ///< null: calls are not recorded
  /// The recorder's id for calls made through the first backend.
  std::uint16_t recorded_as = 0;
};

class Call;  // call.h
class PreparedCall;

/// Sees a group's calls, on the threads that make them. Several threads may call it at once.
class CallObserver {
 public:
  virtual ~CallObserver() = default;
  /// A valid call is about to start. The call holds its tensors. An exception refuses the call, as
  /// `GroupCore::refuse` does, and reaches the caller unchanged. Returns a number for
  /// `on_submitted`: the observer may make calls of its own meanwhile.
  virtual std::uint64_t on_call(const Call& call) = 0;
  /// A synchronous call has succeeded, or an asynchronous one has started and `work` is its Work.
  /// The tensors may have moved into `work`. An exception reaches the caller; the call goes on.
  virtual void on_submitted(const Call& call, std::uint64_t number, const WorkRef& work) = 0;
  /// This process has aborted the group. Any thread; may never return.
  virtual void on_abort() noexcept = 0;
};

/// One backend of a group and the calls made through it. Each backend numbers its own calls.
class BackendCalls {
 public:
  BackendCalls(ProcessGroupBackend& backend, std::uint16_t recorded_as);
  ProcessGroupBackend& backend() const { return backend_; }
  /// Whether the backend works on memory, and numbers, records and times its calls itself
  /// (`SpanBackend`).
  bool uses_spans() const { return uses_spans_; }
  /// Collectives submitted so far.
  std::uint64_t count() const;
  WorkRef submit(Call& call);
  void refuse(Call& call);

 private:
  WorkRef submit_with_tensors(Call& call);
  WorkRef dispatch(Call& call);
  void assign_number(Call& call);

  ProcessGroupBackend& backend_;
  const bool uses_spans_;
  const std::uint16_t recorded_as_;      // the recorder's id for these calls
  std::atomic<std::uint64_t> count_{0};  // used only if the backend does not number its calls
};

/// A backend of muster's own that takes dense CPU memory as spans (`Call::args`), holds tensors
/// only if a call outlives `submit`, and numbers, records and times its calls itself
/// (`collective::CallRecord`). Every other backend gets calls with their tensors, numbered; such a
/// call is recorded as finished when `submit` returns null or when the returned Work ends. A
/// prepared call is submitted repeatedly, so a SpanBackend must not modify a synchronous call,
/// except a receive from any rank.
class SpanBackend : public ProcessGroupBackend {};

/// Thread-safe. Every ProcessGroup is one.
class GroupCore final : public ProcessGroup, public std::enable_shared_from_this<GroupCore> {
 public:
  explicit GroupCore(ProcessGroupParts parts);

  /// The only way to make a call, synchronous or asynchronous, on tensors or on memory, new or
  /// prepared. Throws if the call is invalid, shows it to profilers and records its outcome.
  /// Returns a Work for an asynchronous call and for a receive from any rank, otherwise null.
  WorkRef submit(Call& call);
  /// Runs submit's checks once. The result may be submitted any number of times.
  PreparedCall prepare(Call call);
  /// This member cannot make its call. Throws `why` with rank, group and `name` added. A refused
  /// collective still takes a sequence number and is announced to the other members, so that
  /// none waits for this one. If another member made a valid call under that number, the
  /// group fails; if every member's call was refused, the group stays usable.
  [[noreturn]] void refuse(Op op, std::string_view name, const std::exception& why);
  [[noreturn]] void refuse(const Call& call, const std::exception& why);
  /// As `refuse`, but does not throw.
  void count_refused(const Call& call);

  /// The device of tensors that the group itself exchanges: the CPU, or the current device of the
  /// first kind that has a backend.
  at::Device exchange_device() const;
  /// The parts that it was constructed from, except name and ranks, which ProcessGroup has.
  const ProcessGroupParts& parts() const { return parts_; }
  /// A member's name in errors and traces, by group rank: its rank in the default group before any
  /// shrinking.
  int first_rank_of(int group_rank) const {
    return parts_.first_ranks[static_cast<std::size_t>(group_rank)];
  }

  /// Whether this process has already seen the group's failure: thrown by a call, shown by a Work,
  /// or caused by this process's own abort.
  bool failure_was_shown() const;
  /// Orderly shutdown; every member calls it. Returns the first failure found.
  Status close();
  /// Ends all calls, as `end_calls` and `tell_of_abort` do. For several groups: `abort_groups`.
  void abort(const std::string& reason);
  /// The half of `abort` that runs no code of the program: calls on muster's own backends fail.
  void end_calls(const std::string& reason);
  /// The other half: backends that the program has registered, then the observer. May never return.
  void tell_of_abort(const std::string& reason);

  /// Shows `observer` every later call, until the group ends. A group has at most one observer: a
  /// second one throws DistError. Without an observer, a call costs one load more.
  void observe(std::shared_ptr<CallObserver> observer);
  /// Whether the observer sees calls: true from `observe` on. While it is false, a call costs what
  /// it costs without an observer. Requires an observer.
  void show_calls(bool shown);
  /// Null if there is none.
  CallObserver* observer() const { return registered_.load(std::memory_order_acquire); }

  /// `ProcessGroupBackend::scope` of the backend for CPU tensors, or of the first backend if there
  /// is none; null on a non-member.
  std::shared_ptr<void> manual_progress() const { return scope(BackendScope::manual_progress); }
  std::shared_ptr<void> coalesce_sends() const { return scope(BackendScope::coalesce_sends); }
  /// `BackendCapabilities::shares_memory` of the backend for CPU tensors; false on a non-member.
  bool shares_memory() const;
  /// Collectives this member has submitted through the first backend; 0 on a non-member.
  std::uint64_t collective_count() const;

  /// 1, 2, ...: distinguishes successive monitored barriers of this group.
  std::uint64_t next_monitored_barrier() {
    return monitored_barriers_.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  std::shared_ptr<store::Store> store() const { return parts_.store.lock(); }

 private:
  WorkRef submit_slow(Call& call, at::StepCallbacks* observers);
  /// Throws and refuses the call if it is invalid.
  BackendCalls& checked(const Call& call);
  BackendCalls& backend_for(const Call& call);
  /// The backend for `device`; null if there is none.
  BackendCalls* calls_on(c10::DeviceType device);
  BackendCalls* calls_by(const ProcessGroupBackend& backend);
  void count_refused(Op op, std::string_view name, std::optional<c10::DeviceType> device);
  [[noreturn]] void throw_refused(std::string_view name, const std::exception& why) const;
  ProcessGroupBackend* backend_of_cpu() const;
  std::shared_ptr<void> scope(BackendScope kind) const;

  ProcessGroupParts parts_;
  ProcessGroupBackend* span_backend_ = nullptr;     // the first backend, if it takes CPU memory
  std::atomic<CallObserver*> observer_{nullptr};    // read by every call: registered_, or null
  std::atomic<CallObserver*> registered_{nullptr};  // owned_observer_
  std::deque<BackendCalls> calls_;                  // in order of backends
  std::atomic<std::uint64_t> monitored_barriers_{0};
  /// Whether the program has registered the backend of the device.
  bool is_of_program(c10::DeviceType device) const;

  std::atomic<bool> aborted_{false};  // by this process
  std::shared_ptr<CallObserver> owned_observer_;
};

inline GroupCore& core_of(ProcessGroup& group) { return static_cast<GroupCore&>(group); }
inline const GroupCore& core_of(const ProcessGroup& group) {
  return static_cast<const GroupCore&>(group);
}
/// `group` must not be null.
inline GroupCore& core_of(const Group& group) { return static_cast<GroupCore&>(*group); }

/// Aborts several groups. The calls of all groups on backends of muster's end before any code of
/// the program runs: the `abort` of backends that it has registered, and observers. If that never
/// returns, it holds up what it is of the same kind and comes later, but no end of a call on a
/// backend of muster's. No group may be null.
void abort_groups(std::span<const Group> groups, const std::string& reason);

}  // namespace muster
