// SPDX-License-Identifier: BSD-3-Clause
/// Messages between the members of one group. A channel is an id in the message header: making one
/// opens no connection. Collectives and point-to-point calls are built on it.
///
/// Messages of one (sender, tag) keep their order; different tags may overtake. Small messages are
/// sent eagerly within a credit per (peer, channel). Larger ones send a request first and are then
/// received directly into the receiver's buffer. Unmatched messages block no other channel and
/// their memory is bounded.
///
/// Failure: a channel fails once, with the first cause, for good. Every transfer on it, posted
/// before or after, then completes with that cause, and all members are told. Failing one channel
/// leaves other channels and the links usable.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/transport/channel/fingerprint.h"
#include "core/tunables/tunables.h"
#include "muster/status.h"

namespace muster::transport {

class Fabric;

/// The eager threshold: messages up to this size travel with their envelope; larger ones send a
/// request first.
using fixed::kEagerBytes;

inline constexpr int kAnyMember = -1;

/// One posted send or receive. The buffer must stay as it is until `done()`; after a cancel or
/// failure `done()` means that the fabric no longer touches it.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Thread-safe. After it has returned true, any thread may read the other members.
  bool done() const { return done_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }
  /// Receives: the member that sent it, and how many bytes it sent.
  int source() const { return source_; }
  std::size_t bytes() const { return bytes_; }
  /// Receives: the sender's fingerprint.
  const Fingerprint& fingerprint() const { return fingerprint_; }
  /// The member this waits for; kAnyMember for a receive from any.
  int peer() const { return peer_; }

 protected:
  // Stored last, with release order, and never cleared; the rest does not change afterwards.
  std::atomic<bool> done_{false};
  Status status_;
  int source_ = -1;
  int peer_ = -1;
  std::size_t bytes_ = 0;
  Fingerprint fingerprint_;
};
using TransferRef = std::shared_ptr<Transfer>;

/// The result of an attempt to receive without a transfer.
enum class TryReceive : std::uint8_t {
  received,
  not_yet,         ///< no message has arrived that could be received this way
  needs_transfer,  ///< the arrived message, or one before it, needs a `receive`
};

class Channel {
 public:
  virtual ~Channel() = default;

  virtual std::uint32_t id() const = 0;
  /// Job ranks of the members, in group order.
  virtual std::span<const int> members() const = 0;
  /// This process's position in `members()`.
  virtual int rank() const = 0;
  int size() const { return static_cast<int>(members().size()); }
  virtual Fabric& fabric() = 0;

  /// `member` is a position in `members()`; sending to oneself is allowed and copies. Thread-safe,
  /// never blocks. Point-to-point messages have sequence 0 in `call`; a collective's messages carry
  /// its sequence, and `tag` numbers its steps. Tags of different sequences never meet.
  virtual TransferRef send(int member, std::uint64_t tag, ConstBytes data,
                           const Fingerprint& call) = 0;
  /// As `send`, but returns null if the message has been sent already; no transfer is created then.
  virtual TransferRef try_send_inline(int member, std::uint64_t tag, ConstBytes data,
                                      const Fingerprint& call) {
    return send(member, tag, data, call);
  }
  /// `member` may be kAnyMember for point-to-point messages. A message whose size or dtype differs
  /// completes this receive with Code::mismatch naming both; the channel stays usable. With `exact`
  /// false a shorter message is accepted (`bytes()` is its length). Bytes beyond the end of `data`
  /// are never written.
  virtual TransferRef receive(int member, std::uint64_t tag, MutableBytes data,
                              const Fingerprint& call, bool exact = true) = 0;
  /// Receives a small message if it is the next one in this host's shared ring and has the size of
  /// `data`. Unless it returns `received`, nothing has changed. Thread-safe, never blocks.
  virtual TryReceive try_receive([[maybe_unused]] int member, [[maybe_unused]] std::uint64_t tag,
                                 [[maybe_unused]] MutableBytes data,
                                 [[maybe_unused]] const Fingerprint& call) {
    return TryReceive::needs_transfer;
  }
  /// Cancels a transfer; it is done (Code::aborted) on return. A receive that has begun is drained
  /// to scratch memory. A send that has begun ends with its current fragment, sent from a copy; if
  /// more fragments were to follow, the matching receive fails with Code::aborted naming this rank.
  virtual void cancel(const TransferRef& transfer) = 0;

  /// Declares that this member now runs the collective `call` (sequence > 0). Earlier and later
  /// messages of the same sequence that disagree with it fail the channel on all members, with both
  /// calls named.
  virtual void begin(const Fingerprint& call) = 0;
  /// Compares a call of `member` seen elsewhere (a control line in the region) with the one begun
  /// under the same sequence. Fails the channel if they disagree.
  virtual void compare(int member, const Fingerprint& call) = 0;

  /// The first cause, or success while the channel works. Thread-safe and cheap (an atomic load
  /// while it works).
  virtual Status failure() const = 0;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  /// Whether a member has left the job (`Fabric::gone`): calls that need it will never end.
  bool someone_left() const { return someone_left_.load(std::memory_order_acquire); }
  /// Fails the channel here and tells every member, with the cause's ranks as the culprits. The
  /// first cause wins.
  virtual void fail(Status cause) = 0;

  /// Job ranks of the members whose messages this process waits for now: for deadline errors.
  virtual std::vector<int> awaited() const = 0;

  /// `member` uses this channel no more, though its process may go on: transfers that only it could
  /// complete end with `cause`, now and later. Messages that it has sent can still be received.
  virtual void leave([[maybe_unused]] int member, [[maybe_unused]] const Status& cause) {}

 protected:
  // Both are set once, under the engine's lock, after the cause that they announce.
  std::atomic<bool> failed_{false};
  std::atomic<bool> someone_left_{false};
};

}  // namespace muster::transport
