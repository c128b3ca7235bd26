// SPDX-License-Identifier: BSD-3-Clause
/// Compares the members' calls, enforces deadlines, and finds failures, on a thread of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backends/nccl/nccl_work.h"
#include "core/collective/communicator.h"
#include "core/trace/peer_traces.h"
#include "core/transport/channel/fingerprint.h"

namespace muster::nccl {

/// TORCH_NCCL_ASYNC_ERROR_HANDLING, as torch numbers it.
enum class ErrorHandling {
  none = 0,           ///< nothing is aborted; only blocking waits find out
  abort_and_end = 1,  ///< the communicators are aborted and the process ends
  abort = 2,          ///< the communicators are aborted, and the process lives
  end = 3,            ///< the process ends
  /// The default. A timeout is handled as by `abort_and_end`: synchronous calls have returned long
  /// before, so the program goes on with what their tensors happen to hold until it makes another
  /// call. Every other failure, which the next call reports at once, is handled as by `abort`.
  unset = 4,
};

/// Every collective of a member travels as a fingerprint to the other members, over muster's own
/// links, beside NCCL's call: an all_gather of 32 bytes that nobody waits for. If the fingerprints
/// differ, or some member's does not come by the deadline, or NCCL is not done by then or reports
/// an error, the group fails on every member: this object tells them, has the communicators
/// aborted, and fails the Works. Thread-safe.
class CallWatch {
 public:
  struct WatchTerms {
    std::string group_name;
    std::vector<int> first_ranks;
    std::shared_ptr<collective::Communicator> links;
    std::shared_ptr<const trace::PeerTraces> peer_traces;  ///< may be null
    std::string traced_apart_as;  ///< the calls' group in traces if there are other backends
    std::shared_ptr<GroupFailure> failure;
    ErrorHandling handling = ErrorHandling::unset;
    std::function<bool()> stop_communicators;  ///< whether NCCL uses no call's memory any more
    std::function<std::string()> async_error;  ///< NCCL's; empty: none
  };
  explicit CallWatch(WatchTerms terms);
  /// Stops watching.
  ~CallWatch();
  CallWatch(const CallWatch&) = delete;

  /// The member enters a collective. `work`: null if it was refused here. Returns an entry for
  /// `wait_for_agreement`.
  struct WatchedCall;
  std::shared_ptr<WatchedCall> enter(const transport::Fingerprint& fingerprint,
                                     std::shared_ptr<NcclWork> work, TimePoint deadline);
  /// A message, which has no fingerprint.
  void watch(std::shared_ptr<NcclWork> work);
  /// Blocks until all members have entered the call; throws if their calls differ.
  void wait_for_agreement(const std::shared_ptr<WatchedCall>& entry);

  /// The group fails here and on the other members. `told`: they know already.
  void fail(const Status& why, bool told = false);
  /// The same with an error that NCCL has found in the background. The reason names the first call
  /// that is not done.
  void fail_as_reported(const std::string& error);
  /// The group fails if the links have failed; the reason is that of the first call in flight.
  void fail_if_links_failed();
  enum class DrainScope { collectives, everything };
  /// Waits until it is done, the group has failed, or the deadline.
  Status drain(TimePoint deadline, DrainScope what);
  /// If the group has failed: waits until everything was stopped, or the deadline.
  void wait_until_ended(TimePoint deadline);
  /// Ends the thread. Nothing may be entered afterwards.
  void stop();
  /// After `stop` and a failure: fails the calls that are left. `stopped`: NCCL uses the memory of
  /// no call any more. If it may, their tensors are kept for as long as the process lives.
  void fail_rest(bool stopped);

 private:
  void add(const std::shared_ptr<WatchedCall>& entry);
  void run();
  /// The oldest.
  std::deque<std::shared_ptr<WatchedCall>> entries(
      std::size_t at_most = std::numeric_limits<std::size_t>::max());
  void remove(const std::shared_ptr<WatchedCall>& entry);
  void end_done();
  void look();
  bool look_at(WatchedCall& entry);
  void settle(WatchedCall& entry);
  void compare(WatchedCall& entry);
  Status not_done(const WatchedCall& entry) const;
  Status late(const WatchedCall& entry, const std::vector<int>& awaited) const;
  ErrorHandling handling_of(const Status& why) const;
  void end_all(const Status& why);
  void keep(const std::deque<std::shared_ptr<WatchedCall>>& entries);
  /// `status`, which the other members have found out, as this member has to take it.
  Status as_told(const Status& status) const;
  std::string words(const WatchedCall& entry) const;

  const WatchTerms terms_;
  std::mutex looking_;  // held while a thread looks at entries; before mutex_
  std::mutex mutex_;    // guards the following; released before NCCL, the links or a Work is called
  std::condition_variable wake_;     // for the thread: an entry, a failure, the end
  std::condition_variable changed_;  // for callers: an entry has ended, or all have
  std::deque<std::shared_ptr<WatchedCall>> entries_;
  bool is_idle_ = false;  // the thread waits for an entry or a failure, however long
  bool stopping_ = false;
  bool ended_ = false;  // after a failure: everything was failed
  bool told_ = false;   // the other members know of the failure
  std::thread thread_;  // started with the first entry or failure
};

}  // namespace muster::nccl
