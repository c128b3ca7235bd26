// SPDX-License-Identifier: BSD-3-Clause
/// The allgather by which UCC makes a team: messages of a group's channel.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "backends/carried/library.h"
#include "backends/ucc/api.h"
#include "backends/ucc/library.h"
#include "core/collective/group_context.h"
#include "muster/status.h"

namespace muster::ucc {
/// UCC's team uses it until the team has been destroyed. Not thread-safe: UCC calls it under the
/// library's lock. Never blocks.
class OutOfBand {
 public:
  explicit OutOfBand(collective::GroupContext group) : group_(std::move(group)) {}
  OutOfBand(const OutOfBand&) = delete;

  UccOob functions();
  /// Lets go of the group, for a team that UCC keeps: what it asks for from here on fails.
  void leave() { group_.reset(); }
  /// Job ranks of the members that have not come to the exchange that is under way.
  const std::vector<int>& missing() const { return missing_; }

 private:
  struct MemberExchange;
  UccStatus test(MemberExchange& exchange);

  std::optional<collective::GroupContext> group_;
  std::vector<int> missing_;
};

// A group's team of UCC: its collectives, as backend mpi's communicator asks for them.

UccType type_of(carried::Element element);
UccOp op_of(carried::CarriedReduction reduction);

class Team final : public carried::Comm {
 public:
  /// Every member calls it. Blocks until the team is made, the channel fails or `deadline`, at
  /// which the missing members are named; before that, once in a process, for as long as UCC takes
  /// to make a context. A failed channel is no error here: another member may
  /// have come through, and failed the group in its first call. All calls then report that.
  static Result<std::unique_ptr<Team>> make(UccLibrary& library,
                                            const collective::GroupContext& group,
                                            TimePoint deadline);
  /// UCC keeps a team that has not been freed.
  ~Team() override;

  int free() override;
  int barrier(carried::CarriedRequest& request) override;
  int broadcast(void* data, carried::Count count, carried::Element type, int root,
                carried::CarriedRequest& request) override;
  int all_reduce(const void* in, void* out, carried::Count count, carried::Element type,
                 carried::CarriedReduction op, carried::CarriedRequest& request) override;
  int reduce(const void* in, void* out, carried::Count count, carried::Element type,
             carried::CarriedReduction op, int root, carried::CarriedRequest& request) override;
  int all_gather(const void* in, void* out, carried::Count each, carried::Element type,
                 carried::CarriedRequest& request) override;
  int gather(const void* in, void* out, carried::Count each, carried::Element type, int root,
             carried::CarriedRequest& request) override;
  int scatter(const void* in, void* out, carried::Count each, carried::Element type, int root,
              carried::CarriedRequest& request) override;
  int reduce_scatter(const void* in, void* out, const carried::Count* counts, carried::Element type,
                     carried::CarriedReduction op, carried::CarriedRequest& request) override;
  int all_to_all_uneven(const void* in, const carried::Count* sent,
                        const carried::Count* sent_places, void* out,
                        const carried::Count* received, const carried::Count* received_places,
                        carried::Element type, carried::CarriedRequest& request) override;
  /// UCC has no messages.
  int send(const void*, carried::Count, int, int, carried::CarriedRequest&) override {
    return kErrorUnsupported;
  }
  int receive(void*, carried::Count, int, int, carried::CarriedRequest&) override {
    return kErrorUnsupported;
  }

 private:
  Team(UccLibrary& library, const collective::GroupContext& group)
      : library_(library),
        size_(group.size()),
        rank_(group.rank()),
        out_of_band_(std::make_shared<OutOfBand>(group)) {}
  int start(UccArgs args, carried::CarriedRequest& request);

  UccLibrary& library_;
  const carried::Count size_;
  const int rank_;
  std::shared_ptr<OutOfBand> out_of_band_;
  UccTeam* team_ = nullptr;
};

}  // namespace muster::ucc
