/// A set of ranks that communicate, and the one door to its backends.
///
/// What lives in `group/`: everything that users of the C++ interface touch, on LibTorch tensors.
/// `muster/distributed.h` gathers it. The call path: a function of `collectives.h` or
/// `point_to_point.h` fills one Request; `ProcessGroup::submit` checks, numbers, logs, records and
/// arms the deadline; the tensors' device picks a `ProcessGroupBackend`, whose `submit` turns
/// tensors into spans for `collective::Communicator`. May include everything below. Test it alone:
/// `ctest -R '^group'`.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/bias.h"
#include "muster/group/backend_name.h"
#include "muster/group/process_group_backend.h"
#include "muster/group/request.h"
#include "muster/group/work.h"
#include "muster/store/store.h"
#include "muster/trace/recorder.h"

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
  std::uint16_t recorded_as = 0;                   ///< what the recorder calls this group
};

class PreparedRequest;

inline constexpr trace::Name kNoName;

/// A synchronous collective or message as `plain_calls.h` has laid it out, with what is recorded of
/// it.
struct PlainCall {
  std::string_view name = {};                        ///< a literal
  const trace::Name* recorded = &kNoName;            ///< the same
  const std::optional<Duration>* timeout = nullptr;  ///< null: as one that is not said
  std::uint64_t bytes = 0;
  std::span<const std::int64_t> shape = {};
  std::int64_t tag = 0;  ///< of a message
  int peer = -1;         ///< what traces call the root, or the other end
  std::uint8_t dtype = trace::kNoDType;
  bool valid = false;    ///< see ProcessGroupBackend::run_plain
  bool message = false;  ///< from one member to another
};

/// Thread-safe. A process that is no member holds a group too: its rank and size are -1 and calls
/// on it do nothing.
class ProcessGroup : public std::enable_shared_from_this<ProcessGroup> {
 public:
  explicit ProcessGroup(ProcessGroupParts parts);

  /// The only place that checks, numbers, logs, records and arms the deadline. Returns the Work of
  /// an asynchronous call or of a receive, else none.
  WorkRef submit(Request request);
  /// Whether calls may come by `run_plain` now: the first backend takes them, this process is a
  /// member, and no debugging wants to see requests.
  bool takes_plain() const;
  /// Numbers, logs, records, arms the deadline and carries out, as `submit` does, all but the last
  /// once the call is on its way; what `submit` checks holds already. False, with nothing done,
  /// where a profiler wants to see this call: it must come as a request then, next on this thread.
  bool run_plain(const collective::Args& args, const PlainCall& call);
  /// The same checks now, and `start()` as often as one likes.
  PreparedRequest prepare(Request request);
  /// This member's call cannot be made, because of `why`: throws that, with rank, group and `name`.
  /// A collective counts as a call all the same, and the other members are told, so that none waits
  /// for this one: where one of them made a proper call under its number the group fails, where all
  /// were refused it goes on.
  [[noreturn]] void refuse(Op op, std::string_view name, const std::exception& why);

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

  /// `ProcessGroupBackend::drive_here`, of the backend that serves CPU tensors or else the first;
  /// null on a non-member.
  std::shared_ptr<void> drive_here() const;
  /// `ProcessGroupBackend::send_together`, of the same backend.
  std::shared_ptr<void> send_together() const;
  /// `ProcessGroupBackend::shares_memory`, of the backend that serves CPU tensors; false on a
  /// non-member.
  bool shares_memory() const;

  /// 1, 2, ...: tells one monitored barrier of this group from the next.
  std::uint64_t next_monitored_barrier() {
    return monitored_barriers_.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  std::shared_ptr<store::Store> store() const { return parts_.store.lock(); }

 private:
  friend class PreparedRequest;
  class PlainEntry;
  ProcessGroupBackend& checked(const Request& request);
  ProcessGroupBackend& backend_for(const Request& request) const;
  ProcessGroupBackend* backend_of_cpu() const;
  struct Armed {
    std::uint64_t sequence = 0;
    TimePoint begun, deadline;
  };
  Armed arm(std::string_view name, bool collective, const std::optional<Duration>* timeout);
  std::uint64_t next_number();
  void arm(Request& request);
  template <class Start>
  WorkRef observed(ProcessGroupBackend& backend, Request& request, Start start);
  template <class Start>
  WorkRef carry_out(ProcessGroupBackend& backend, Request& request, Start start);

  ProcessGroupParts parts_;
  ProcessGroupBackend* plain_ = nullptr;
  std::atomic<Duration> timeout_;
  std::atomic<std::uint64_t> collectives_{0};
  Bias counting_;  // of the threads that count there
  std::atomic<std::uint64_t> monitored_barriers_{0};
  std::atomic<bool> aborted_{false};  // by this process
};
using Group = std::shared_ptr<ProcessGroup>;

/// A call that is checked and laid out once and started often, as MPI's persistent requests are.
/// The tensors keep their memory as long as it lives. On the native backend a synchronous `start()`
/// on contiguous tensors takes no memory of its own after the first ones.
class PreparedRequest {
 public:
  /// What ProcessGroup::submit does, but for the checks. One start at a time: a Work that it
  /// returns is waited for before the next.
  WorkRef start();

 private:
  friend class ProcessGroup;
  PreparedRequest() = default;
  Group group_;                             // null on a non-member
  ProcessGroupBackend* backend_ = nullptr;  // the group's
  Request request_;
  std::unique_ptr<PreparedCall> call_;
};

}  // namespace muster
