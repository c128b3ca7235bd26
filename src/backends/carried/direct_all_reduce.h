// SPDX-License-Identifier: BSD-3-Clause
/// An all_reduce by muster's own algorithm over MPI's messages, for groups of few members.
///
/// The fast algorithms of an MPI library may be those of its blocking call alone (Open MPI 4.1's
/// MPI_Iallreduce takes two to six times as long as its MPI_Allreduce), and a thread in a blocking
/// call cannot be told that a member has died. Messages are as fast, and can be given up.
///
/// Small inputs go whole from each member to all others, and each member reduces all of them.
/// Larger inputs are divided: each member reduces one slice and sends the result to the others,
/// chunk by chunk (reduce-scatter and all-gather). Either way inputs are added in the order of the
/// members, so the result has the same bits on all of them.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "backends/carried/library.h"
#include "core/collective/communicator.h"
#include "core/collective/plan/plan.h"
#include "core/tunables/tunables_fixed.h"
#include "muster/status.h"

namespace muster::carried {

/// Reusable, since buffers are kept. Not thread-safe.
class DirectAllReduce {
 public:
  DirectAllReduce(CallLibrary& library, Comm& comm, int rank, int size);

  /// Whether calls of this kind are made so: the same on every member.
  static bool takes(const collective::Args& args, int size);

  /// Starts the reduction of `in`, which has the size of the call's input and, like the memory of
  /// `args`, stays while the call is `active`. Calls of a group that overlap in time have different
  /// tags; `tag + 1` and `tag + 2` are used too.
  Status begin(const collective::Args& args, const std::byte* in, int tag);
  /// Advances MPI; the result once the reduction has ended. Code::mismatch if a member has sent
  /// another size.
  std::optional<Status> test();
  /// Whether MPI may still use the memory.
  bool active() const;
  void trim();

 private:
  static constexpr std::align_val_t kPage{4096};
  struct FreeReceived {
    void operator()(std::byte* memory) const { ::operator delete(memory, kPage); }
  };
  /// Messages from or to another member, in order; at most `kReduceDepth` in flight.
  struct MessageStream {
    struct StreamSlot {
      CarriedRequest request;
      std::size_t bytes = 0;
    };
    std::array<StreamSlot, fixed::kReduceDepth> slots;
    std::size_t posted = 0, done = 0;
    bool has_room() const { return posted - done < slots.size(); }
    bool active() const;
  };
  struct ReducingPeer {
    int member = -1;
    collective::plan::Slice slice;  ///< the elements that it reduces
    std::size_t chunks = 0;         ///< of its slice
    MessageStream inputs_out, inputs_in, results_out, results_in;
  };

  Status advance(ReducingPeer& peer);
  Status poll(MessageStream& stream, const ReducingPeer& peer, bool receives);
  Status send(MessageStream& stream, const ReducingPeer& peer, ConstBytes data, int tag);
  /// Receives `expected` bytes. More room keeps a wrong size from being an error of MPI's, which
  /// some libraries make an abort.
  Status receive(MessageStream& stream, const ReducingPeer& peer, MutableBytes room,
                 std::size_t expected, int tag);
  /// Bytes of chunk `index` of `slice`, from the start of the tensor.
  collective::plan::Slice range(const collective::plan::Slice& slice, std::size_t index) const;
  /// The memory that receives a peer's input for chunk `index`. Chunks that are `kReduceDepth`
  /// apart share it: the later one is received only once the earlier one has been reduced.
  std::byte* place(int member, std::size_t index) const;
  bool can_reduce() const;
  void reduce_chunk();
  bool has_ended() const;

  CallLibrary& library_;
  Comm& comm_;
  const int rank_;
  const int size_;
  const collective::Args* args_ = nullptr;
  const std::byte* in_ = nullptr;
  int tag_ = 0;
  bool whole_ = false;             // each member reduces everything
  std::size_t chunk_ = 1;          // elements
  std::size_t place_bytes_ = 0;    // what a chunk may take
  collective::plan::Slice slice_;  // the elements that this member reduces
  std::size_t chunks_ = 0, reduced_ = 0;
  std::vector<ReducingPeer> peers_;
  std::vector<const std::byte*> inputs_;  // of a chunk, by member
  std::unique_ptr<std::byte, FreeReceived> received_;
  std::size_t capacity_ = 0;
};

}  // namespace muster::carried
