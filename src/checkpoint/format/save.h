// SPDX-License-Identifier: BSD-3-Clause
/// Saving: what the ranks have becomes one checkpoint, or nothing does.
///
/// The ranks write into a folder of this save alone (staging.h). When all have told that their
/// files are on the disk, rank 0 writes the index and gives the folder its name: that rename is the
/// commit, and what was there before is whole until then. Free of torch and of any network:
/// `Exchange` is all that ranks need of each other, so a test plays them in one thread or many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/files/index.h"
#include "checkpoint/format/history.h"
#include "checkpoint/format/plan/division.h"
#include "checkpoint/format/staging.h"
#include "muster/status.h"

namespace muster::shards {

/// How long ranks wait for each other in an exchange.
enum class ExchangeLimit {
  group_timeout,  ///< all come at once: the group's timeout holds
  none,           ///< they write or read files before it, which takes as long as the disk needs
};

/// Every rank gives a text and gets all of them, by rank. Blocks; fails on all ranks where one is
/// gone, or not there in time.
using Exchange =
    std::function<Result<std::vector<std::string>>(const std::string& mine, ExchangeLimit limit)>;

struct SavingRanks {
  int rank = 0;
  int size = 1;
  Exchange exchange = {};  ///< not called where size is 1
};

/// Each rank's text; or on all ranks the first failure, naming its rank. Collective.
Result<std::vector<std::string>> exchange_or_fail(const SavingRanks& ranks, const Status& mine,
                                                  const std::string& text, ExchangeLimit limit);

struct CommitOptions {
  std::string path;                       ///< the folder of this checkpoint
  std::optional<std::int64_t> step = {};  ///< stored, and shown by `muster checkpoint`
  bool overwrite = true;                  ///< else a checkpoint at `path` is refused
  int keep_last = 0;                      ///< of those in the folder around it; 0: all
  bool durable = true;                    ///< on the disk when it returns; off for tests
  SaverIdentity saver = {};               ///< rank 0's counts
};

/// The files of a save and the order of the pieces in them. `files` are those of all ranks.
struct PlannedSave {
  CommitOptions options;
  std::vector<WrittenFile> files;
  std::string stamp = {};                            ///< of the folder, by which all ranks name it
  std::shared_ptr<StagingFolder> staging = nullptr;  ///< rank 0's

  /// The folder that this rank writes into.
  std::string folder() const { return staging_path(options.path, stamp); }

  /// This rank's pieces, in the order in which they are written.
  std::vector<const WrittenPiece*> pieces_of(int rank) const;
  static std::int64_t bytes_of(const WrittenPiece& piece);
};

/// Collective: agrees who writes what, and makes the folder. Brief: no tensor is looked at.
/// `before`: why this rank has no shards; then it fails on all ranks.
Result<PlannedSave> plan_save(const std::vector<Shard>& shards, const CommitOptions& options,
                              const SavingRanks& ranks, const Status& before = {});

/// Collective: writes and commits. `data[i]`: the bytes of `pieces_of(rank)[i]`, which stay as they
/// are until it returns. `values`: JSON; rank 0's counts. `before`: why this rank has no data; then
/// it fails on all ranks. Waits for the slowest rank without a limit, as long as that is alive.
Status finish_save(const PlannedSave& plan, const std::vector<const std::byte*>& data,
                   const std::string& values, const SavingRanks& ranks, const Status& before = {});

/// Reads bytes of a piece, from the byte `at` of it on: for pieces that are not in memory.
using ReadPiece =
    std::function<Status(const WrittenPiece& piece, std::uint64_t at, std::span<std::byte> to)>;
/// As above; the bytes are asked for in parts, in order.
Status finish_save(const PlannedSave& plan, const ReadPiece& read, const std::string& values,
                   const SavingRanks& ranks);

/// The two at once; `data[i]`: the memory of `shards[i]`.
Status save(const std::vector<Shard>& shards, const std::vector<const std::byte*>& data,
            const std::string& values, const CommitOptions& options, const SavingRanks& ranks);

}  // namespace muster::shards
