/// A group's team of UCC: its collectives, as backend mpi's communicator asks for them.
#pragma once

#include <memory>

#include "backends/mpi/library.h"
#include "backends/ucc/library.h"
#include "backends/ucc/out_of_band.h"
#include "core/collective/group_context.h"
#include "muster/status.h"

namespace muster::ucc {

UccType type_of(mpi::Element element);
UccOp op_of(mpi::MpiReduction reduction);

class Team final : public mpi::Comm {
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
  int barrier(mpi::MpiRequest& request) override;
  int broadcast(void* data, mpi::Count count, mpi::Element type, int root,
                mpi::MpiRequest& request) override;
  int all_reduce(const void* in, void* out, mpi::Count count, mpi::Element type,
                 mpi::MpiReduction op, mpi::MpiRequest& request) override;
  int reduce(const void* in, void* out, mpi::Count count, mpi::Element type, mpi::MpiReduction op,
             int root, mpi::MpiRequest& request) override;
  int all_gather(const void* in, void* out, mpi::Count each, mpi::Element type,
                 mpi::MpiRequest& request) override;
  int gather(const void* in, void* out, mpi::Count each, mpi::Element type, int root,
             mpi::MpiRequest& request) override;
  int scatter(const void* in, void* out, mpi::Count each, mpi::Element type, int root,
              mpi::MpiRequest& request) override;
  int reduce_scatter(const void* in, void* out, const mpi::Count* counts, mpi::Element type,
                     mpi::MpiReduction op, mpi::MpiRequest& request) override;
  int all_to_all_uneven(const void* in, const mpi::Count* sent, const mpi::Count* sent_places,
                        void* out, const mpi::Count* received, const mpi::Count* received_places,
                        mpi::Element type, mpi::MpiRequest& request) override;
  /// UCC has no messages.
  int send(const void*, mpi::Count, int, int, mpi::MpiRequest&) override {
    return kErrorUnsupported;
  }
  int receive(void*, mpi::Count, int, int, mpi::MpiRequest&) override { return kErrorUnsupported; }

 private:
  Team(UccLibrary& library, const collective::GroupContext& group)
      : library_(library),
        size_(group.size()),
        rank_(group.rank()),
        out_of_band_(std::make_shared<OutOfBand>(group)) {}
  int start(UccArgs args, mpi::MpiRequest& request);

  UccLibrary& library_;
  const mpi::Count size_;
  const int rank_;
  std::shared_ptr<OutOfBand> out_of_band_;
  UccTeam* team_ = nullptr;
};

}  // namespace muster::ucc
