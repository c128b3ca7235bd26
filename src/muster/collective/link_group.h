/// The collectives of a group over the links of its channel: for groups that do not all share one
/// host region. Used by `Communicator` alone.
///
/// Every result is computed in one place from all members' contributions in the order of their
/// ranks, then handed out: the same bits on every member, every run, and one rounding for 16-bit
/// floats. Which algorithm runs is the `Selection`'s to say. Temporary memory is at most 512 KiB
/// per member (1 MiB for a premul_sum; between two 2 MiB), whatever the size of the call, with the
/// defaults, and all pieces of a gather or scatter along a tree; see `most_bytes`.
///
/// What each algorithm sends is told a second time in `plan/schedule.h`, for the proof and the cost
/// model; a test holds the two together. Of a root's invitations to a direct reduce, which carry
/// nothing, schedules do not tell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "muster/base/task.h"
#include "muster/collective/communicator.h"
#include "muster/collective/outstanding_transfers.h"
#include "muster/collective/selection.h"
#include "muster/transport/channel.h"
#include "muster/transport/fingerprint.h"

namespace muster::collective {

class LinkGroup {
 public:
  LinkGroup(transport::Channel& channel, const Selection& selection)
      : selection_(selection),
        rank_(channel.rank()),
        size_(channel.size()),
        outstanding_(channel) {}

  /// One collective, one at a time; `args` are valid and, like `call`, outlive the task. No
  /// transfer is under way when it ends.
  Task<Status> run(const Args& args, const transport::Fingerprint& call);
  /// What the running task waits for.
  const OutstandingTransfers& outstanding() const { return outstanding_; }
  /// Whether nothing of the last task is under way. A task that has thrown leaves something behind,
  /// which ends with the channel.
  bool at_rest() { return outstanding_.all_done(); }

 private:
  struct Reduction;
  class HostReduction;

  Task<Status> barrier();
  /// Down a `TreePlan` or a `ChainPlan`.
  template <class Plan>
  Task<Status> broadcast(const Args& args, Plan plan);
  Task<Status> all_reduce_small(const Args& args);
  Task<Status> reduce_direct(const Args& args);
  /// all_reduce, reduce and reduce_scatter of any size: every member reduces one slice and hands it
  /// to whom it concerns.
  Task<Status> reduce_by_slices(const Args& args);
  /// The same from host to host (`link_hosts.cc`).
  Task<Status> reduce_by_hosts(const Args& args);
  Task<Status> all_gather_small(const Args& args);
  Task<Status> all_gather_ring(const Args& args);
  Task<Status> all_gather_direct(const Args& args);
  Task<Status> gather(const Args& args);
  Task<Status> scatter(const Args& args);
  /// The same for small pieces, those of a subtree together (`link_tree.cc`).
  Task<Status> gather_along_tree(const Args& args);
  Task<Status> scatter_along_tree(const Args& args);
  Task<Status> take_pieces(const Args& args);
  Task<Status> pass_up(const Args& args);
  Task<Status> hand_pieces(const Args& args);
  Task<Status> pass_down(const Args& args);
  Task<Status> all_to_all(const Args& args);

  /// Sends the `held[0]` bytes at position 0 around until positions 0 to size - 1 are filled
  /// (`BruckPlan`); `starts[i]` is where position i begins, `starts[size]` the end.
  Task<Status> gather_rotated(std::byte* blocks, const std::vector<std::size_t>& starts);
  /// Waits for all that is under way and says how it went.
  Task<Status> finish();

  /// At least `bytes`, 64-byte aligned, kept for the next call where it is not large.
  std::byte* scratch(std::size_t bytes);
  void drop_large_scratch();
  /// Nothing where they are the same memory.
  static void copy(MutableBytes to, ConstBytes from);
  /// This member's contribution as it goes into the sum.
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
