// SPDX-License-Identifier: BSD-3-Clause
/// Large all_reduces and reduces: each member reduces its share of every window and passes the
/// result to all members, or to the root.
///
/// An input in the arena is read in place. A private input passes through its owner's windows,
/// except for the share that the owner reduces itself. A result is stored directly into outputs in
/// the arena. For private outputs it stays in the reducer's result buffer until they have copied
/// it. The choice is made member by member, and every mix works. In-place reduction is safe: each
/// share of the input is read only by its reducer, which writes the result after the read.
///
/// A private result must be copied once more, and the result of a reduce goes to one member only.
/// So with two members, or on shared cores, the root of a reduce also reduces the shares of members
/// with private inputs. Those members only stage their input.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/time/task.h"
#include "core/collective/communicator.h"
#include "core/collective/region/member_parts.h"
#include "core/shm/segment_layout.h"
#include "core/transport/channel/fingerprint.h"
#include "muster/status.h"

namespace muster::collective::region {

/// How one such call is executed.
struct ReductionPlan {
  const Args& args;
  ConstBytes input;
  std::size_t element = 1;
  std::size_t grain = 1;  ///< elements per cache line
  std::size_t count = 0;
  std::size_t window = 0;  ///< elements
  std::size_t rounds = 0;
  int root = -1;        ///< the only member that receives the result; -1: all
  bool scaled = false;  ///< premul_sum: windows hold the product, including this member's share
  bool staged = false;  ///< this member's input passes through its windows
  bool copies = false;  ///< this member copies results from peers' result buffers
  bool publishes_results = false;  ///< a peer copies results from this member's result buffer
  bool reclaims = false;           ///< this member reclaims the lines that it reads in windows
  bool reclaims_results = false;   ///< and those in result buffers
  bool root_reduces = false;       ///< the root reduces the shares of members with private inputs
  bool root_fills_late = false;    ///< the root fills its first window after publishing its line,
                                   ///< once it knows that others reduce

  void cut(std::size_t bytes) {
    window = bytes / element;
    rounds = (count + window - 1) / window;
  }
  bool needs_result(int member) const { return root < 0 || root == member; }
  std::size_t start(std::size_t round) const { return round * window; }
  std::size_t length(std::size_t round) const { return std::min(window, count - start(round)); }
  shm::Share share(std::size_t round, std::size_t members, int member) const {
    return shm::share_of(length(round), members, static_cast<std::size_t>(member), grain);
  }
};

class ShareReduction {
 public:
  explicit ShareReduction(MemberParts& parts)
      : parts_(parts), outputs_(parts.segment.layout().members) {}

  Task<Status> run(const Args& args, const transport::Fingerprint& call);

 private:
  ReductionPlan plan(const Args& args);
  void place(ReductionPlan& plan);
  Task<Status> stage_rest(const ReductionPlan& plan);
  bool all_mapped(const ReductionPlan& plan);
  Status resolve(ReductionPlan& plan);
  void assign_root_shares(ReductionPlan& plan);
  int reducer(const ReductionPlan& plan, int member) const;
  Task<Status> reduce_round(const ReductionPlan& plan, std::size_t round);
  Task<Status> copy_results(const ReductionPlan& plan, std::size_t round);
  void fill_input(const ReductionPlan& plan, std::size_t round);
  void fill_and_publish(const ReductionPlan& plan, std::size_t round);
  bool reduce_shares(const ReductionPlan& plan, std::size_t round);
  bool reduce_share(const ReductionPlan& plan, std::size_t round, shm::Share share,
                    std::byte* buffer);
  void copy_result(const ReductionPlan& plan, int member, std::size_t round);

  MemberParts& parts_;
  std::vector<std::byte*> outputs_;  // peers' outputs in the arena; null: not in the arena
};

}  // namespace muster::collective::region
