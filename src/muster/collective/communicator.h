/// The collectives and point-to-point calls of one group, over bytes: free of torch.
///
/// What lives here: `Communicator`; `plan/`, rank arithmetic with no I/O (which slice, to whom, in
/// which step); the algorithms over links and over the host region, all of them resumable tasks;
/// the kernels; the selection. May include base/, store/ and transport/. Test it alone: `ctest -R
/// collective`.
///
/// Collectives of one communicator run and end in the order in which they were started, one after
/// another; a blocking call drives earlier ones first, on the caller's thread. Point-to-point
/// messages run beside them. Two communicators may be used from two threads in any order. The locks
/// are per communicator; none is held while waiting, but for a moment
/// (docs/internals/architecture.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/clock.h"
#include "muster/base/dtype.h"
#include "muster/base/status.h"
#include "muster/collective/call_record.h"
#include "muster/collective/op.h"
#include "muster/collective/slice_list.h"
#include "muster/trace/peer_traces.h"
#include "muster/transport/channel.h"
#include "muster/transport/fabric.h"

namespace muster::collective {

/// One call, as this member makes it. Buffers are contiguous; sizes are whole elements; they stay
/// the caller's and must stay as they are until the call is done. Slices are one per member where
/// `info(op)` says that a side lists, else exactly one.
///   broadcast       outputs[0], in and out (read on the root)
///   all_reduce      inputs[0] -> outputs[0]; may be the same memory
///   reduce          inputs[0] -> outputs[0] on the root, only there; may be the same memory
///   all_gather      inputs[0] -> outputs[r] of every member r; sizes may differ between members:
///                   outputs[r] is as long as r's input
///   gather          inputs[0] -> outputs[r] on the root
///   scatter         inputs[r] on the root -> outputs[0]
///   reduce_scatter  inputs[r] from all members reduced -> outputs[0] on r; sizes may differ
///                   between r
///   all_to_all      inputs[r] -> r's outputs[me]; sizes may differ; empty ones too
///   barrier         nothing
///   send            inputs[0] to `root`, under `tag`
///   recv            outputs[0] from `root`, under `tag`
struct Args {
  Op op = Op::barrier;
  DType dtype = DType::uint8;
  Reduce reduce = Reduce::sum;
  double factor = 1.0;  ///< premul_sum
  int root = -1;        ///< position in the group; the other end of a message
  std::uint64_t tag = 0;
  SliceList<ConstBytes> inputs = {};
  SliceList<MutableBytes> outputs = {};
  /// The length of every slice, said by a caller who has seen that they are all equal: what follows
  /// from it need not be found out anew then.
  std::size_t each = kUnsaid;
  static constexpr std::size_t kUnsaid = ~std::size_t{0};
  /// Said by a caller who has seen that `validate` (call.h) would find nothing wrong.
  bool checked = false;
};

struct Tuning;

/// A started call. Holds what the call needs; may be dropped (the call goes on).
class Pending {
 public:
  virtual ~Pending() = default;
  /// Thread-safe; never blocks.
  virtual bool done() const = 0;
  /// Drives this call (and those before it) on this thread until it is done or `deadline`; then its
  /// status. A deadline of this wait that passes gives Code::timed_out and leaves the call going;
  /// the call's own deadline fails the communicator.
  virtual Status wait(TimePoint deadline) = 0;
  /// Receives: member it came from, and bytes.
  virtual int source() const = 0;
  virtual std::size_t bytes() const = 0;
  /// Runs `callback` once, when done, on a thread that nobody else needs
  /// (base/callback_executor.h): it may block, and wait for other calls. What it throws is logged.
  /// Calls before this one are done by then, but their callbacks may run beside this one or after
  /// it.
  virtual void when_done(std::function<void(const Status&)> callback) = 0;
  /// Runs `notice` once, when done, on the thread that finds out (at once if it is already). The
  /// notices of collectives run in their order, under a lock of the communicator's: they must not
  /// block, throw, or run code of the user's.
  virtual void when_settled(std::function<void(const Status&)> notice) = 0;
};
using PendingRef = std::shared_ptr<Pending>;

struct CommunicatorOptions {
  std::string name;  ///< shown in errors; tells groups of the same ranks apart
  std::string terms =
      {};  ///< what else must be equal on all members: those with other terms do not meet
  Duration timeout = std::chrono::minutes(30);  ///< for making it
  bool use_region = true;                       ///< false: links only (for tests and comparison)
  /// Asked now and then while the making waits for others; a failure that it returns ends the
  /// making with it. Must not block for long.
  std::function<Status()> give_up = {};
  std::shared_ptr<const trace::PeerTraces> peer_traces =
      {};  ///< asked what the others did last when a deadline has passed; may be null
  /// Which algorithms the group uses, where this is its first member; null: what the environment
  /// says (`tuning_of_environment`).
  std::shared_ptr<const Tuning> tuning = {};
};

/// What the first member of a group tells the others where a call of theirs carries it anyway: no
/// agreement of their own is needed then. Goes over the wire as it is.
struct GroupProposal {
  std::uint64_t channel = 0;  ///< 0: none is made
  std::uint64_t segment = 0;  ///< of the host's region
};

class Communicator {
 public:
  /// Every member calls it with the same members (job ranks; their order is the group's) and name;
  /// blocks until all have. Agrees on a channel id over the fabric's channel for agreements: no
  /// connection is made for it. A one-member group talks to nobody.
  static Result<std::shared_ptr<Communicator>> create(std::shared_ptr<transport::Fabric> fabric,
                                                      std::vector<int> members,
                                                      CommunicatorOptions options);
  /// What this rank proposes to the other members of a group of which it is the first, as `create`
  /// would be called. None where a tuning says how the group runs: `create` tells that to all. An
  /// proposal is good for one group: it is committed by all members or cancelled.
  static GroupProposal propose(transport::Fabric& fabric, const std::vector<int>& members,
                               const CommunicatorOptions& options);
  /// `create` where every member has the first one's proposal, and all are known to make the same
  /// group. Waits for nobody.
  static Result<std::shared_ptr<Communicator>> commit(std::shared_ptr<transport::Fabric> fabric,
                                                      std::vector<int> members,
                                                      const GroupProposal& proposal,
                                                      CommunicatorOptions options);
  /// Takes back this rank's proposal, where nobody accepts it.
  static void cancel(transport::Fabric& fabric, const GroupProposal& proposal);
  /// Divides a group: every member calls it, in the order of its collectives, with the same `parts`
  /// (positions in `parent`, disjoint; a part's order is its group's). Any number of groups for the
  /// price of one agreement: one gather on `parent`. Null where this member is in no part.
  static Result<std::shared_ptr<Communicator>> split(const std::shared_ptr<Communicator>& parent,
                                                     const std::vector<std::vector<int>>& parts,
                                                     CommunicatorOptions options);
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::span<const int> members() const = 0;
  virtual const std::string& name() const = 0;
  virtual transport::Channel& channel() = 0;

  /// Blocking: start to end on this thread. Invalid arguments are found before anything is sent; a
  /// failure of the group is its first cause. Also a message from or to a named member.
  virtual Status run(const Args& args, CallRecord& record) = 0;
  /// Queued; the process's progress thread advances it, `Pending::wait` takes over. What the call
  /// reads and writes may belong to `owner`, which is held until nothing does so any more. Where
  /// the call cannot be queued (no memory, no thread) the group fails on all members. Also a
  /// message, from any member too (`root` kAnyMember): order is kept per (peer, tag).
  virtual PendingRef start(Args args, CallRecord& record, std::shared_ptr<void> owner) = 0;
  /// The same for calls of which nothing is recorded.
  Status run(const Args& args, TimePoint deadline);
  PendingRef start(Args args, TimePoint deadline, std::shared_ptr<void> owner = {});
  PendingRef send(int member, std::uint64_t tag, ConstBytes data, DType dtype, TimePoint deadline,
                  std::shared_ptr<void> owner = {});
  PendingRef receive(int member_or_any, std::uint64_t tag, MutableBytes data, DType dtype,
                     TimePoint deadline, std::shared_ptr<void> owner = {});

  /// While what it returns lives, the caller drives what is started here, by `Pending::done` now
  /// and then and by a `wait` in the end: the progress thread keeps off as long as the calling
  /// thread computes (driving_thread.h). Where that stands still elsewhere, it helps some
  /// milliseconds later, as soon as it looks, which is every 50 ms at least. For a machine that has
  /// no core left for another thread.
  virtual std::shared_ptr<void> drive_here() = 0;
  /// While what it returns lives, `look` is called now and then on the calling thread where that
  /// waits for others in a call of this communicator; it may abort it. To be let go on the same
  /// thread.
  virtual std::shared_ptr<void> on_idle(std::function<void()> look) = 0;

  /// Says that this member could not make its next call, an `op`, because of its arguments. That
  /// counts as a call: the others learn it, and where one of them has made a proper call under that
  /// number, the group fails on all with both calls named, so that nobody waits for this member.
  /// Where all were refused the group goes on. Never blocks. Returns the number; 0 where nobody
  /// need be told.
  virtual std::uint64_t refuse(Op op) = 0;

  /// Collectives started so far.
  virtual std::uint64_t sequence() const = 0;
  virtual Status failure() const = 0;
  /// Ends everything in outstanding with Code::aborted and tells the other members.
  virtual void abort(const std::string& reason) = 0;
  /// Orderly end: drains what is in outstanding, compares the members' sequence numbers (a member
  /// that skipped a call is named) and gives the channel and segments back. Every member calls it.
  virtual Status close(TimePoint deadline) = 0;
};

/// Whether a group of these ranks runs its collectives in the host's region: there are several of
/// them, and it holds them all. The same answer on every one of them.
bool share_a_region(transport::Fabric& fabric, std::span<const int> members);

}  // namespace muster::collective
