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

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/time/task.h"
#include "core/collective/communicator.h"
#include "core/collective/outstanding_transfers.h"
#include "core/collective/select/selection.h"
#include "core/transport/channel/channel.h"
#include "core/transport/channel/fingerprint.h"

namespace muster::collective {

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
  /// What the running task waits for.
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
