/// Large all_reduces and reduces: each member reduces its share of every window and hands the
/// result to all, or to the root.
///
/// An input in the arena is read where it is. A private one passes through its owner's windows,
/// except for the share that the owner reduces itself. A result is stored straight into outputs in
/// the arena; for private outputs it stands in the reducer's result buffer until they have copied
/// it. Every mix of the two works, member by member. In-place reduction is safe: each share of the
/// input is read only by its reducer, which writes the result after the read.
///
/// A private result has to be handed on, and a reduce's result goes to one member only. So between
/// two members, and if members share cores, the root of a reduce also takes the shares of those
/// with private inputs. They give and are done.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/status.h"
#include "muster/base/task.h"
#include "muster/collective/communicator.h"
#include "muster/collective/region/member_parts.h"
#include "muster/shm/segment_layout.h"
#include "muster/transport/fingerprint.h"

namespace muster::collective::region {

/// How one such call is carried out.
struct ReductionPlan {
  const Args& args;
  ConstBytes input;
  std::size_t element = 1;
  std::size_t grain = 1;  ///< elements in a cache line
  std::size_t count = 0;
  std::size_t window = 0;  ///< elements
  std::size_t rounds = 0;
  int root = -1;                  ///< the only member that wants the result; -1: all do
  bool scaled = false;            ///< premul_sum: windows hold the product, this member's share too
  bool staged = false;            ///< this member's input passes through its windows
  bool copies = false;            ///< this member copies results out of the others' buffers
  bool offers = false;            ///< a peer copies results out of this member's buffer
  bool reclaims = false;          ///< this member reclaims what it reads in windows,
  bool reclaims_results = false;  ///< and in result buffers
  bool by_root = false;           ///< the root reduces the shares of members with private inputs
  bool late = false;  ///< the root fills its first window after its line: only then it knows
                      ///< that others reduce

  void cut(std::size_t bytes) {
    window = bytes / element;
    rounds = (count + window - 1) / window;
  }
  bool wants(int member) const { return root < 0 || root == member; }
  std::size_t start(std::size_t round) const { return round * window; }
  std::size_t length(std::size_t round) const { return std::min(window, count - start(round)); }
  shm::Share share(std::size_t round, std::size_t members, int member) const {
    return shm::share_of(length(round), members, static_cast<std::size_t>(member), grain);
  }
};

class ShareReduction {
 public:
  explicit ShareReduction(MemberParts& parts)
      : my_(parts), outputs_(parts.segment.layout().members) {}

  Task<Status> run(const Args& args, const transport::Fingerprint& call);

 private:
  ReductionPlan plan(const Args& args);
  void place(ReductionPlan& plan);
  Task<Status> give(const ReductionPlan& plan);
  bool all_mapped(const ReductionPlan& plan);
  Status resolve(ReductionPlan& plan);
  void settle(ReductionPlan& plan);
  int reducer(const ReductionPlan& plan, int member) const;
  Task<Status> reduce_round(const ReductionPlan& plan, std::size_t round);
  Task<Status> copy_results(const ReductionPlan& plan, std::size_t round);
  void fill_input(const ReductionPlan& plan, std::size_t round);
  void fill_and_tell(const ReductionPlan& plan, std::size_t round);
  bool reduce_shares(const ReductionPlan& plan, std::size_t round);
  bool reduce_share(const ReductionPlan& plan, std::size_t round, shm::Share share,
                    std::byte* buffer);
  void copy_result(const ReductionPlan& plan, int member, std::size_t round);

  MemberParts& my_;
  std::vector<std::byte*> outputs_;  // peers' outputs in the arena; null: elsewhere
};

}  // namespace muster::collective::region
