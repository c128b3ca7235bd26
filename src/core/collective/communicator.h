// SPDX-License-Identifier: BSD-3-Clause
/// The collectives and point-to-point calls of one group, over bytes: free of torch.
///
/// Folder: `Communicator`; `plan/`, rank arithmetic without I/O (which slice, to whom, in which
/// step); the algorithms over links and over the host region, as resumable tasks; the kernels; the
/// selection. May include base/, store/ and transport/. Tests: `ctest -R collective`.
///
/// Collectives of one communicator run and complete in the order in which they were started; a
/// blocking call first drives earlier ones on the caller's thread. Point-to-point messages run
/// concurrently with them. Two communicators may be used from two threads in any order. Locks are
/// per communicator; none is held while waiting, except for one bounded wait
/// (docs/internals/collectives.md, "Locks").
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/dtype.h"
#include "core/collective/call_record.h"
#include "core/collective/op.h"
#include "core/collective/slice_list.h"
#include "core/trace/peer_traces.h"
#include "core/transport/channel/channel.h"
#include "core/transport/fabric.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::collective {

class PieceSums;  // quantized/piece_sums.h

/// One call, as this member makes it. Buffers are contiguous and hold whole elements. They belong
/// to the caller and must not change until the call is done. A side has one slice per member if
/// `info(op)` says so, otherwise exactly one.
///   broadcast       outputs[0], in and out (read on the root)
///   all_reduce      inputs[0] -> outputs[0]; may be the same memory
///   reduce          inputs[0] -> outputs[0] on the root only; may be the same memory
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
  int root = -1;        ///< position in the group; for a message, the peer
  std::uint64_t tag = 0;
  SliceList<ConstBytes> inputs = {};
  SliceList<MutableBytes> outputs = {};
  /// The length of every slice, set by a caller that has checked that they are all equal. Saves
  /// computing it again.
  std::size_t each = kUnknownLength;
  static constexpr std::size_t kUnknownLength = ~std::size_t{0};
  /// Set by a caller that has checked that `validate` (call.h) would succeed.
  bool checked = false;
  /// For a part of a call with an encoding: the whole, which members compare instead of the part.
  /// Its sequence does not matter; without flags it says nothing.
  transport::Fingerprint part_of = {};
  /// For an all_reduce in place of a group that `takes_pieces`: computes it. Then the slices say
  /// only which memory it uses, beside its own.
  PieceSums* pieces = nullptr;
};

struct Tuning;

/// A started call. Holds everything that the call needs. May be dropped; the call continues.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Thread-safe; never blocks.
  virtual bool done() const = 0;
  /// Drives this call (and earlier ones) on this thread until it is done or `deadline` has passed,
  /// then returns its status. If the deadline of this wait passes, returns Code::timed_out and the
  /// call continues. The call's own deadline fails the communicator.
  virtual Status wait(TimePoint deadline) = 0;
  /// For receives: the source member and the number of bytes.
  virtual int source() const = 0;
  virtual std::size_t bytes() const = 0;
  /// Runs `callback` once, when done, on a dedicated thread
  /// (core/wait/callbacks.h). It may block and wait for other calls. Exceptions
  /// are logged. Earlier calls are done by then, but their callbacks may run concurrently with this
  /// one or later.
  virtual void when_done(std::function<void(const Status&)> callback) = 0;
  /// Runs `notice` once, when done, on the thread that finds out (immediately if already done).
  /// Notices of collectives run in order, under a lock of the communicator: they must not block,
  /// throw or run user code.
  virtual void when_settled(std::function<void(const Status&)> notice) = 0;
};
using PendingRef = std::shared_ptr<Pending>;

struct CommunicatorOptions {
  std::string name;  ///< shown in errors; distinguishes groups of the same ranks
  /// Further text that must be equal on all members: members with other terms do not meet.
  std::string terms = {};
  Duration timeout = std::chrono::minutes(30);  ///< for creation
  bool use_region = true;                       ///< false: links only (for tests and comparison)
  /// Polled while creation waits for other members; a failure that it returns ends creation. Must
  /// not block for more than milliseconds.
  std::function<Status()> give_up = {};
  /// Source of the other members' last calls for deadline errors; may be null.
  std::shared_ptr<const trace::PeerTraces> peer_traces = {};
  /// The algorithms that the group uses, if this is its first member. Null: from the environment
  /// (`tuning_of_environment`).
  std::shared_ptr<const Tuning> tuning = {};
};

/// Sent by the first member of a group to the others, piggybacked on an existing call, so that no
/// separate agreement is needed. Also the wire format.
struct GroupProposal {
  std::uint32_t channel = 0;  ///< 0: none
  /// Connections that the longest of this rank's links to members needs. All members propose, for
  /// this; the largest goes into the proposal that is committed (`settle`).
  std::uint32_t strands = 0;
  std::uint64_t segment = 0;  ///< of the host's region
};

class Communicator {
 public:
  /// Every member calls it with the same members (job ranks, in group order) and name; blocks until
  /// all have. Agrees on a channel id over the fabric's agreement channel and opens no connection.
  /// A one-member group does not communicate.
  static Result<std::shared_ptr<Communicator>> create(std::shared_ptr<transport::Fabric> fabric,
                                                      std::vector<int> members,
                                                      CommunicatorOptions options);
  /// This rank's proposal to the other members of a group of which it is the first, with the
  /// arguments that `create` would take. Returns an empty proposal if a tuning applies to the
  /// group, because only `create` distributes tunings. An empty one, and that of any other member,
  /// has `strands` alone. A proposal is good for one group: either all members commit it or the
  /// proposer cancels it.
  static GroupProposal propose(transport::Fabric& fabric, const std::vector<int>& members,
                               const CommunicatorOptions& options);
  /// The proposal that the members commit, by those of all of them in group order; the same on
  /// every rank. Empty (the first member's is cancelled) if none was made, and over a long way if
  /// the group goes around a ring, because only `create` settles its order.
  static GroupProposal settle(transport::Fabric& fabric, const std::vector<int>& members,
                              std::span<const GroupProposal> proposals);
  /// Like `create`, if every member has what `settle` returns and all are known to create the same
  /// group. Does not wait.
  static Result<std::shared_ptr<Communicator>> commit(std::shared_ptr<transport::Fabric> fabric,
                                                      std::vector<int> members,
                                                      const GroupProposal& proposal,
                                                      CommunicatorOptions options);
  /// Cancels this rank's proposal. No member may commit it.
  static void cancel(transport::Fabric& fabric, const GroupProposal& proposal);
  /// Splits a group: every member calls it, in the order of its collectives, with the same `parts`
  /// (positions in `parent`, disjoint, in group order). Creates any number of groups with one
  /// gather on `parent`, over a long way with three. Null if this member is in no part.
  static Result<std::shared_ptr<Communicator>> split(const std::shared_ptr<Communicator>& parent,
                                                     const std::vector<std::vector<int>>& parts,
                                                     CommunicatorOptions options);
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::span<const int> members() const = 0;
  virtual const std::string& name() const = 0;
  virtual transport::Channel& channel() = 0;
  /// Whether members read each other's memory.
  virtual bool shares_memory() const = 0;
  /// Whether memory of failed calls may still be written to, because what carries them cannot
  /// cancel them: the caller then keeps it for ever. Once true, it stays true.
  virtual bool keeps_memory() const { return false; }
  /// Whether started calls run `CallRecord::prepare`.
  virtual bool prepares_calls() const { return false; }
  /// Whether `Args::pieces` may be given; the same on every member. Over links, in groups that are
  /// small enough for messages to all members at once. All members are on one host, or each on
  /// another: with several on each of several hosts, sums that are gathered by hosts cross the
  /// network once for each host.
  virtual bool takes_pieces() const { return false; }

  /// Blocking: runs on this thread from start to end. Invalid arguments are reported before
  /// anything is sent. If the group has failed, returns its first cause. Also runs messages from or
  /// to a named member.
  virtual Status run(const Args& args, CallRecord& record) = 0;
  /// Queued: the process's progress thread advances it, and `Pending::wait` takes over. `owner` is
  /// held until the call's buffers are no longer used. If the call cannot be queued (no memory, no
  /// thread), the group fails on all members. Also runs messages, including a receive from any
  /// member (`root` kAnyMember). Messages keep their order per (peer, tag).
  virtual PendingRef start(Args args, CallRecord& record, std::shared_ptr<void> owner) = 0;
  /// The same for calls that are not recorded.
  Status run(const Args& args, TimePoint deadline);
  PendingRef start(Args args, TimePoint deadline, std::shared_ptr<void> owner = {});
  PendingRef send(int member, std::uint64_t tag, ConstBytes data, DType dtype, TimePoint deadline,
                  std::shared_ptr<void> owner = {});
  PendingRef receive(int member_or_any, std::uint64_t tag, MutableBytes data, DType dtype,
                     TimePoint deadline, std::shared_ptr<void> owner = {});

  /// While the returned object lives, the caller drives the calls that it starts here, with
  /// `Pending::done` between its own work and `wait` at the end. The progress thread leaves them
  /// alone as long as the calling thread uses its core (driver.h). If that thread blocks
  /// elsewhere, the progress thread notices within 50 ms and helps. For machines without a spare
  /// core for the progress thread.
  virtual std::shared_ptr<void> manual_progress() = 0;
  /// While the returned object lives, the calling thread calls `callback` at least every 500 ms
  /// while it waits in a call of this communicator. `callback` may abort the communicator. Must be
  /// destroyed on the same thread.
  virtual std::shared_ptr<void> on_idle(std::function<void()> callback) = 0;

  /// Reports that this member could not make its next call, an `op`, because of its arguments. It
  /// counts as a call: the other members are told, and if one of them has made a valid call with
  /// that number, the group fails on all members with both calls named, so that no member waits for
  /// this one. If all members were refused, the group continues. Never blocks. Returns the number,
  /// or 0 if there is no one to tell.
  virtual std::uint64_t refuse(Op op) = 0;

  /// Number of collectives started so far.
  virtual std::uint64_t sequence() const = 0;
  virtual Status failure() const = 0;
  /// Ends all outstanding calls with Code::aborted and notifies the other members.
  virtual void abort(const std::string& reason) = 0;
  /// Orderly end: completes outstanding calls, compares the members' sequence numbers (a member
  /// that skipped a call is named) and frees the channel and segments. Every member must call it.
  virtual Status close(TimePoint deadline) = 0;
};

/// Whether a group of these ranks runs its collectives in the host's region: it has at least two
/// ranks, and the region contains them all. The same on every member.
bool share_a_region(transport::Fabric& fabric, std::span<const int> members);

/// As `Communicator::create`, but returns only the channel that the members have agreed on: for
/// communicators whose calls are carried by something else than muster's engine, such as MPI.
/// `use_region` and `tuning` of the options do not matter.
Result<std::shared_ptr<transport::Channel>> create_channel(
    const std::shared_ptr<transport::Fabric>& fabric, std::vector<int> members,
    CommunicatorOptions options);

}  // namespace muster::collective
