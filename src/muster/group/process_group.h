/// A set of ranks that communicate, and the single entry point to its backends.
///
/// `group/` holds everything that users of the C++ interface touch, on LibTorch tensors;
/// `muster/distributed.h` includes it. A call takes this path: a function of `collectives.h` or
/// `point_to_point.h` builds and checks one `Call`; `ProcessGroup::submit` picks a
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
#include <string>
#include <string_view>
#include <vector>

#include "muster/group/backend_name.h"
#include "muster/group/process_group_backend.h"
#include "muster/group/work.h"
#include "muster/store/store.h"
#include "muster/trace/recorder.h"

namespace at {
struct StepCallbacks;  // <ATen/record_function.h>
}

namespace muster {

namespace collective {
struct Lineage;  // survivors.h
}

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

class PreparedCall;

/// Sees a group's calls, on the threads that make them. Several threads may call it at once.
class CallObserver {
 public:
  virtual ~CallObserver() = default;
  /// A valid call is about to start. The call holds its tensors. An exception refuses the call, as
  /// `ProcessGroup::refuse` does, and reaches the caller unchanged.
  virtual void on_call(const Call& call) = 0;
  /// A synchronous call has succeeded, or an asynchronous one has started and `work` is its Work.
  /// The tensors may have moved into `work`. An exception reaches the caller; the call goes on.
  virtual void on_submitted(const Call& call, const WorkRef& work) = 0;
  /// This process is about to abort the group. Called on any thread.
  virtual void on_abort() noexcept = 0;
};

/// One backend of a group and the calls made through it. Each backend numbers its own calls.
class BackendCalls {
 public:
  BackendCalls(ProcessGroupBackend& backend, std::uint16_t recorded_as)
      : backend_(backend), recorded_as_(recorded_as) {}
  ProcessGroupBackend& backend() const { return backend_; }
  /// Collectives submitted so far.
  std::uint64_t count() const;
  WorkRef submit(Call& call);
  void refuse(Call& call);

 private:
  WorkRef submit_with_tensors(Call& call);
  WorkRef dispatch(Call& call);
  void assign_number(Call& call);

  ProcessGroupBackend& backend_;
  const std::uint16_t recorded_as_;      // the recorder's id for these calls
  std::atomic<std::uint64_t> count_{0};  // used only if the backend does not number its calls
};

/// Thread-safe. A non-member process also holds a ProcessGroup: its rank and size are -1, and calls
/// on it do nothing.
class ProcessGroup : public std::enable_shared_from_this<ProcessGroup> {
 public:
  explicit ProcessGroup(ProcessGroupParts parts);

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

  bool is_member() const { return parts_.rank >= 0; }
  /// This process's rank; -1 on a non-member. So is `size()`.
  int rank() const { return parts_.rank; }
  int size() const { return is_member() ? static_cast<int>(parts_.ranks.size()) : -1; }
  const std::string& name() const { return parts_.name; }
  const std::vector<int>& ranks() const { return parts_.ranks; }
  /// The backend text the group was created with.
  const std::string& backend() const { return parts_.config.text(); }
  /// Everything the group was constructed from.
  const ProcessGroupParts& parts() const { return parts_; }
  /// Timeout of calls that give none.
  Duration timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(Duration timeout) { timeout_.store(timeout, std::memory_order_relaxed); }

  /// Convert between ranks of the default group and of this group. Throw DistError naming a rank
  /// that is not there.
  int group_rank_of(int global_rank) const;
  int global_rank_of(int group_rank) const;
  /// A member's name in errors and traces, by group rank: its rank in the default group before any
  /// shrinking.
  int first_rank_of(int group_rank) const {
    return parts_.first_ranks[static_cast<std::size_t>(group_rank)];
  }

  Status failure() const;
  /// Whether this process has already seen the group's failure: thrown by a call, shown by a Work,
  /// or caused by this process's own abort.
  bool failure_was_shown() const;
  /// Orderly shutdown; every member calls it. Returns the first failure found.
  Status close();
  void abort(const std::string& reason);

  /// Shows `observer` every later call, until the group ends. A group has at most one observer: a
  /// second one throws DistError. Without an observer, a call costs one load more.
  void observe(std::shared_ptr<CallObserver> observer);
  /// Null if there is none.
  CallObserver* observer() const { return observer_.load(std::memory_order_acquire); }

  /// `ProcessGroupBackend::scope` of the backend for CPU tensors, or of the first backend if there
  /// is none; null on a non-member.
  std::shared_ptr<void> drive_here() const { return scope(BackendScope::drive_here); }
  std::shared_ptr<void> send_together() const { return scope(BackendScope::send_together); }
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
  ProcessGroupBackend* memory_backend_ = nullptr;  // the first backend, if it takes CPU memory
  std::atomic<CallObserver*> observer_{nullptr};   // owned_observer_, which every call reads
  std::atomic<Duration> timeout_;
  std::deque<BackendCalls> calls_;  // in order of backends
  std::atomic<std::uint64_t> monitored_barriers_{0};
  std::atomic<bool> aborted_{false};  // by this process
  std::shared_ptr<CallObserver> owned_observer_;
};
using Group = std::shared_ptr<ProcessGroup>;

}  // namespace muster
