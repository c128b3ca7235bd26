// SPDX-License-Identifier: BSD-3-Clause
/// Which commit is restored after a death, and which bytes go where. Pure functions: all ranks know
/// what every rank can read, so all come to the same plan, each by itself. Free of torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/plan/division.h"
#include "jobs/elastic/commit_memory.h"
#include "muster/status.h"

namespace muster::elastic {

/// A rank's part of a commit that some rank can read: its own, that of the process that it
/// replaces, or one that it keeps for another node.
struct ReachablePart {
  CommitId id;
  std::int32_t holder = 0;      ///< the rank that can read it now
  std::int32_t memory = 0;      ///< its number there
  std::int32_t rank = 0;        ///< whose part it was
  std::int32_t world_size = 1;  ///< then
  std::int32_t is_agreed = 0;
};

/// The newest commit of which the parts of all ranks can be read. None if no commit has been made
/// yet. Fails with Code::exhausted, saying which parts are lost, if one has been made and cannot be
/// read any more.
Result<std::optional<CommitId>> newest_whole(std::span<const ReachablePart> parts);

/// Rank by rank: the rank that keeps a second copy of its commits, on the next node, whose ranks
/// take turns; -1 if there is one node. `nodes`: by rank.
std::vector<int> partners_of(std::span<const std::int64_t> nodes);

/// Offset of each tensor of a part in its memory, bytes.
std::vector<std::uint64_t> offsets_of(std::span<const shards::Shard> shards);
std::uint64_t bytes_of(const shards::Shard& shard);
/// Bytes of all tensors of a part, with the padding between them.
std::uint64_t data_bytes_of(std::span<const shards::Shard> shards);

struct PieceSource {
  int holder = 0, memory = 0;
  std::vector<shards::Shard> shards;
};

/// Bytes `from` on in a memory of the holder, for the memory of a wanted tensor from `into` on.
struct PieceCopy {
  int holder = 0, memory = 0;
  std::size_t wanted = 0;
  std::uint64_t from = 0, into = 0, bytes = 0;
};

/// All pieces of one commit.
class PieceMap {
 public:
  PieceMap() = default;
  /// Fails if the ranks disagree on the type or the sizes of a tensor.
  static Result<PieceMap> of(std::span<const PieceSource> sources);

  struct CommittedTensor {
    std::string dtype;
    shards::Extent sizes;
  };
  std::map<std::string, CommittedTensor> tensors() const;

  /// The copies that make up the tensors that `receiver` wants, from its own memory if that has the
  /// bytes. Fails if the commit has no such tensor, or not all of it.
  Result<std::vector<PieceCopy>> copies(std::span<const shards::Shard> wanted, int receiver) const;

 private:
  struct PiecePlace {
    int holder = 0, memory = 0;
    std::uint64_t at = 0;
  };
  struct TensorPieces {
    CommittedTensor whole;
    std::map<shards::Box, std::vector<PiecePlace>> places;
  };
  static const PiecePlace& nearest(const std::vector<PiecePlace>& places, int receiver);

  std::map<std::string, TensorPieces> tensors_;
};

}  // namespace muster::elastic
