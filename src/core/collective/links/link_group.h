// SPDX-License-Identifier: BSD-3-Clause
/// The collectives of a group over the links of its channel, for groups that do not share one host
/// region. Used only by `Communicator`.
///
/// Every result is computed in one place and then distributed: the same bits on every member and in
/// every run. It is computed from all members' contributions in rank order with one rounding of
/// 16-bit floats, or from the sums of hosts, each rounded (`link_hosts.cc`). The `Selection`
/// chooses the algorithm. Temporary memory is bounded, however large the tensors are:
/// docs/internals/algorithms.md has the figures, `most_bytes` those of some algorithms.
///
/// `plan/schedule.h` describes the messages of each algorithm a second time, for the proof and the
/// cost model; a test compares the two. Schedules omit the root's ready-to-receive messages in a
/// direct reduce, which carry no data.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/time/task.h"
#include "core/collective/communicator.h"
#include "core/collective/select/selection.h"
#include "core/transport/channel/channel.h"
#include "core/transport/channel/fingerprint.h"
#include "muster/status.h"

namespace muster::collective {

/// The transfers that a running collective has posted, in slots that can be waited for one by one.
/// A failed transfer fails the channel, which ends all others. So waiting for `all_done` always
/// ends, and no buffer is in use afterwards.
class OutstandingTransfers {
 public:
  static constexpr int kSlots = 28;  // limit: bits of `used_`

  explicit OutstandingTransfers(transport::Channel& channel)
      : channel_(channel), heard_(channel.members().size()) {}

  void begin(const transport::Fingerprint& call) {
    call_ = call;
    status_ = Status();
  }
  void send(int slot, int member, std::uint64_t tag, ConstBytes data) {
    post(slot, member, false, [&] { return channel_.send(member, tag, data, call_); });
  }
  void receive(int slot, int member, std::uint64_t tag, MutableBytes data) {
    post(slot, member, true, [&] { return channel_.receive(member, tag, data, call_); });
  }

  /// Whether this slot has no outstanding transfer; called often.
  bool done(int slot) {
    TransferSlot& entry = slots_[static_cast<std::size_t>(slot)];
    for (; entry.settled < entry.posted.size(); ++entry.settled) {
      const Posted& posted = entry.posted[entry.settled];
      if (!posted.transfer->done()) return false;
      settle(posted);
    }
    entry.posted.clear();
    entry.settled = 0;
    used_ &= ~(1u << slot);
    return true;
  }
  bool all_done() {
    bool all = true;
    for (std::uint32_t left = used_; left != 0; left &= left - 1)
      all = done(std::countr_zero(left)) && all;
    return all;
  }
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

  /// Job ranks that the open receives wait for; if there are none, those of the open sends.
  std::vector<int> awaited() const;
  /// The latest call in a message from this member; sequence 0 if there is none.
  const transport::Fingerprint& heard(int member) const {
    return heard_[static_cast<std::size_t>(member)];
  }

 private:
  struct Posted {
    transport::TransferRef transfer;
    int member;
    bool receives;
  };
  struct TransferSlot {
    std::vector<Posted> posted;
    std::size_t settled = 0;
  };

  /// Creates the entry first: a posted transfer must be known here.
  template <class Start>
  void post(int slot, int member, bool receives, Start start) {
    auto& posted = slots_[static_cast<std::size_t>(slot)].posted;
    posted.push_back({nullptr, member, receives});
    try {
      posted.back().transfer = start();
    } catch (...) {
      posted.pop_back();
      throw;
    }
    used_ |= 1u << slot;
  }
  void settle(const Posted& posted) {
    if (posted.transfer->status().ok()) {
      if (posted.receives)
        heard_[static_cast<std::size_t>(posted.member)] = posted.transfer->fingerprint();
      return;
    }
    if (!status_.ok()) return;
    status_ = posted.transfer->status();
    if (!channel_.failed()) channel_.fail(status_);
  }

  transport::Channel& channel_;
  transport::Fingerprint call_;
  Status status_;
  std::array<TransferSlot, kSlots> slots_;
  std::uint32_t used_ = 0;  // one bit per non-empty slot
  static_assert(kSlots <= 32);
  std::vector<transport::Fingerprint> heard_;
};

class LinkGroup {
 public:
  LinkGroup(transport::Channel& channel, const Selection& selection)
      : selection_(selection),
        rank_(channel.rank()),
        size_(channel.size()),
        outstanding_(channel) {}

  /// Runs one collective, one at a time. `args` must be valid and, like `call`, outlive the task.
  /// No transfer is outstanding when it ends.
  Task<Status> run(const Args& args, const transport::Fingerprint& call);
  /// The transfers that the running task waits for.
  const OutstandingTransfers& outstanding() const { return outstanding_; }
  /// Whether no transfer of the last task is outstanding. A task that has thrown leaves some, which
  /// end with the channel.
  bool quiesced() { return outstanding_.all_done(); }

 private:
  class HostRounds;

  Task<Status> barrier();
  /// Along a `TreePlan` or a `ChainPlan`.
  template <class Plan>
  Task<Status> broadcast(const Args& args, Plan plan);
  Task<Status> all_reduce_small(const Args& args);
  /// The all_reduce of encoded values (`link_pieces.cc`).
  Task<Status> all_reduce_in_pieces(const Args& args);
  Task<Status> reduce_direct(const Args& args);
  /// Reductions, all_gather and broadcast within and between hosts (`link_hosts.cc`). Without first
  /// ranks, as if every member had a host of its own, every member reduces one slice.
  Task<Status> run_by_hosts(const Args& args, std::span<const int> first_ranks);
  Task<Status> all_gather_small(const Args& args);
  Task<Status> all_gather_ring(const Args& args);
  Task<Status> all_gather_direct(const Args& args);
  Task<Status> gather(const Args& args);
  Task<Status> scatter(const Args& args);
  /// The same for small pieces; the pieces of a subtree share a message (`link_tree.cc`).
  Task<Status> gather_along_tree(const Args& args);
  Task<Status> scatter_along_tree(const Args& args);
  Task<Status> receive_pieces(const Args& args);
  Task<Status> forward_up(const Args& args);
  Task<Status> send_pieces(const Args& args);
  Task<Status> forward_down(const Args& args);
  Task<Status> all_to_all(const Args& args);

  /// Circulates blocks (`BruckPlan`): starts with the `held[0]` bytes at position 0 and ends with
  /// positions 0 to size - 1 filled. Position i begins at `starts[i]`; `starts[size]` is the end.
  Task<Status> gather_rotated(std::byte* blocks, const std::vector<std::size_t>& starts);
  /// Waits for all outstanding transfers and returns the outcome.
  Task<Status> finish();

  /// At least `bytes`, 64-byte aligned; kept for the next call unless it is large.
  std::byte* scratch(std::size_t bytes);
  void drop_large_scratch();
  /// No-op if both are the same memory.
  static void copy(MutableBytes to, ConstBytes from);
  /// This member's contribution as an operand of the sum.
  static void contribute(std::byte* to, ConstBytes from, const Args& args);

  struct AlignedDelete {
    void operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{64}); }
  };

  const Selection selection_;
  const int rank_;
  const int size_;
  OutstandingTransfers outstanding_;
  std::unique_ptr<std::byte, AlignedDelete> scratch_;
  std::size_t scratch_bytes_ = 0;
};

}  // namespace muster::collective
