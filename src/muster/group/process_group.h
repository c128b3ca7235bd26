/// A set of ranks that communicate, and the one door to its backends.
///
/// What lives in `group/`: everything that users of the C++ interface touch, on LibTorch tensors.
/// `muster/distributed.h` gathers it. The call path: a function of `collectives.h` or
/// `point_to_point.h` builds and checks one `Call`; `ProcessGroup::submit` picks a
/// `ProcessGroupBackend` by the tensors' device; its `submit` gives the call's memory to
/// `collective::Communicator`, which numbers, records and times it. May include everything below.
/// Test it alone: `ctest -R '^group'`.
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
  /// What errors and traces call the members: their ranks in the default group as it was before any
  /// shrinking. Empty: `ranks`.
  std::vector<int> first_ranks = {};
  int rank = -1;  ///< this process's position in them; -1: not a member
  BackendConfig config;
  Duration timeout = std::chrono::minutes(30);
  /// The job's, while it lives: there members leave their sides of a mismatch (`detail.h`).
  std::weak_ptr<store::Store> store = {};
  /// Backend of each kind of device; empty for a non-member.
  std::vector<std::pair<c10::DeviceType, std::shared_ptr<ProcessGroupBackend>>> backends;
  /// Of a group that was shrunk out of another.
  std::shared_ptr<const collective::Lineage> lineage = nullptr;
  std::shared_ptr<trace::Recorder> recorder = {};  ///< null: calls are not recorded
  /// What the recorder calls this group's calls by its first backend.
  std::uint16_t recorded_as = 0;
};

class PreparedCall;

/// One backend of a group and the calls that are made by it. Each has numbers of its own.
class BackendCalls {
 public:
  BackendCalls(ProcessGroupBackend& backend, std::uint16_t recorded_as)
      : backend_(backend), recorded_as_(recorded_as) {}
  ProcessGroupBackend& backend() const { return backend_; }
  /// Its collectives that have been made so far.
  std::uint64_t made() const;
  WorkRef submit(Call& call);
  void refuse(Call& call);

 private:
  WorkRef submit_with_tensors(Call& call);
  WorkRef hand_on(Call& call);
  void number(Call& call);

  ProcessGroupBackend& backend_;
  const std::uint16_t recorded_as_;     // what the recorder calls them
  std::atomic<std::uint64_t> made_{0};  // where the backend numbers none itself
};

/// Thread-safe. A process that is no member holds a group too: its rank and size are -1 and calls
/// on it do nothing.
class ProcessGroup : public std::enable_shared_from_this<ProcessGroup> {
 public:
  explicit ProcessGroup(ProcessGroupParts parts);

  /// The one way to make a call: synchronous or asynchronous, on tensors or on memory, first or
  /// prepared. Refuses it where something is wrong with it; shows it to profilers; has it recorded
  /// how it ended. Returns the Work of an asynchronous call or of a receive from any rank, else
  /// none.
  WorkRef submit(Call& call);
  /// The same checks now, and `submit` as often as one likes.
  PreparedCall prepare(Call call);
  /// This member's call cannot be made, because of `why`: throws that, with rank, group and `name`.
  /// A collective counts as a call all the same, and the other members are told, so that none waits
  /// for this one: where one of them made a proper call under its number the group fails, where all
  /// were refused it goes on.
  [[noreturn]] void refuse(Op op, std::string_view name, const std::exception& why);
  [[noreturn]] void refuse(const Call& call, const std::exception& why);
  /// The same without the throwing.
  void count_refused(const Call& call);

  bool is_member() const { return parts_.rank >= 0; }
  /// -1 for a non-member, like `size()`.
  int rank() const { return parts_.rank; }
  int size() const { return is_member() ? static_cast<int>(parts_.ranks.size()) : -1; }
  const std::string& name() const { return parts_.name; }
  const std::vector<int>& ranks() const { return parts_.ranks; }
  /// The text that the group's backend was asked for by.
  const std::string& backend() const { return parts_.config.text(); }
  /// What it is made of.
  const ProcessGroupParts& parts() const { return parts_; }
  /// Of calls that name none.
  Duration timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(Duration timeout) { timeout_.store(timeout, std::memory_order_relaxed); }

  /// From a rank of the default group to one of this and back; throw DistError naming the rank that
  /// is not there.
  int group_rank_of(int global_rank) const;
  int global_rank_of(int group_rank) const;
  /// What errors and traces call a member (by its position): its rank in the default group as that
  /// was before any shrinking.
  int first_rank_of(int group_rank) const {
    return parts_.first_ranks[static_cast<std::size_t>(group_rank)];
  }

  Status failure() const;
  /// Whether a call of this process has thrown the group's failure, a Work has shown it, or this
  /// process has aborted the group.
  bool failure_was_shown() const;
  /// Orderly end: every member calls it. Its failure is the first that was found.
  Status close();
  void abort(const std::string& reason);

  /// `ProcessGroupBackend::scope`, of the backend that serves CPU tensors or else the first; null
  /// on a non-member.
  std::shared_ptr<void> drive_here() const { return scope(BackendScope::drive_here); }
  std::shared_ptr<void> send_together() const { return scope(BackendScope::send_together); }
  /// `BackendCapabilities::shares_memory`, of the backend that serves CPU tensors; false on a
  /// non-member.
  bool shares_memory() const;
  /// Collectives that this member has made on it, as its first backend counts them; 0 on a
  /// non-member.
  std::uint64_t collective_count() const;

  /// 1, 2, ...: tells one monitored barrier of this group from the next.
  std::uint64_t next_monitored_barrier() {
    return monitored_barriers_.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  std::shared_ptr<store::Store> store() const { return parts_.store.lock(); }

 private:
  WorkRef submit_unusual(Call& call, at::StepCallbacks* observers);
  /// Refuses the call where something is wrong with it.
  BackendCalls& checked(const Call& call);
  BackendCalls& backend_for(const Call& call);
  /// Of the backend for `device`; null where there is none.
  BackendCalls* calls_on(c10::DeviceType device);
  BackendCalls* calls_by(const ProcessGroupBackend& backend);
  void count_refused(Op op, std::string_view name, std::optional<c10::DeviceType> device);
  [[noreturn]] void throw_refused(std::string_view name, const std::exception& why) const;
  ProcessGroupBackend* backend_of_cpu() const;
  std::shared_ptr<void> scope(BackendScope kind) const;

  ProcessGroupParts parts_;
  ProcessGroupBackend* memory_backend_ = nullptr;  // the first, where it takes memory of the CPU
  std::atomic<Duration> timeout_;
  std::deque<BackendCalls> calls_;  // the first backend's first
  std::atomic<std::uint64_t> monitored_barriers_{0};
  std::atomic<bool> aborted_{false};  // by this process
};
using Group = std::shared_ptr<ProcessGroup>;

}  // namespace muster
