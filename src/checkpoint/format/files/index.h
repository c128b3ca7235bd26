// SPDX-License-Identifier: BSD-3-Clause
/// Which save a checkpoint is: the first entry of its index, with a digest of its own, so that the
/// checkpoints of a folder are put in order without reading their indexes.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "checkpoint/format/plan/box.h"
#include "muster/status.h"

namespace muster::shards {
struct CommitRecord {
  std::optional<std::int64_t> step = {};
  /// Grows within the folder around the checkpoint; 0 in checkpoints of versions without it.
  std::int64_t number = 0;
  std::string token = {};  ///< drawn at random for each save
  std::string name = {};   ///< of the checkpoint's folder; another one is a copy
  std::string job = {};    ///< the job's name; empty: none
  /// Drawn at random for each launch of the job; empty: not told, or of versions without it.
  std::string launch = {};
  /// The launches of the job that this one has gone on from, the last ones: what they save from now
  /// on is of processes that were left behind.
  std::vector<std::string> before = {};
  std::int64_t epoch = 0;         ///< of the launch; 0: none
  std::int64_t committed_ns = 0;  ///< only in checkpoints without a number

  /// The save that began later.
  bool is_later_than(const CommitRecord& other) const {
    return std::tie(number, token) > std::tie(other.number, other.token);
  }
  /// Whether `other` is of a later epoch of the same launch of the same job. Each launch counts its
  /// epochs from 1, so those of two launches say nothing of each other.
  bool is_older_epoch_than(const CommitRecord& other) const {
    return epoch > 0 && other.epoch > epoch && launch == other.launch && job == other.job;
  }
  /// Whether a launch has saved `other` that has gone on from this one.
  bool was_left_behind_by(const CommitRecord& other) const;
  /// Notes that this launch comes after that of `other`, if they are two of one job.
  void go_on_from(const CommitRecord& other);
  /// "epoch 3 of job 'a'", or "another saver".
  std::string saver_text() const;
};

nlohmann::json json_of(const CommitRecord& record);
/// Refuses what does not fit its digest.
Result<CommitRecord> record_in(const nlohmann::json& commit);
/// Reads only the beginning of a checkpoint's index. Fails where that is altered. Checkpoints of
/// versions without a record have the time of their commit.
Result<CommitRecord> read_record(const std::string& folder);

// The index of a checkpoint, muster.json: its tensors, where their pieces lie, and digests of
// everything. A folder without it is no checkpoint.
//
//   checkpoint/
//     shard-00001-model-00001-of-00001.safetensors ...   the pieces that the ranks wrote
//     muster.json                                        written last

inline constexpr const char* kIndexName = "muster.json";

struct StoredPiece {
  std::string file;
  Box box;
  std::uint64_t at = 0;  ///< its first byte in the file
  std::string digest;    ///< of all its bytes: in checkpoints of versions without blocks
  std::string blocks;    ///< `BlockDigests` of its bytes; both are empty in folders of others
};

struct StoredTensor {
  std::string dtype;
  Extent sizes;
  std::vector<StoredPiece> pieces;
};

struct StoredFile {
  std::uint64_t bytes = 0;
  std::uint64_t header_bytes = 0;  ///< the length and the JSON
  std::string header_digest;
};

struct Index {
  std::string folder;  ///< not stored
  std::optional<std::int64_t> step;
  CommitRecord commit;
  int world_size = 1;         ///< of the job that saved it
  std::string saved_at;       ///< "2024-06-07T12:00:00Z", to be shown; nothing is ordered by it
  std::string digest;         ///< of itself; in a folder that others wrote, of all headers
  std::string values = "{}";  ///< what is no tensor, as JSON
  std::map<std::string, StoredFile> files;
  std::map<std::string, StoredTensor> tensors;

  std::uint64_t bytes() const;  ///< of all files
};

/// With a digest of itself at its end.
std::string text_of_index(const Index& index);
/// Refuses what was cut off or altered anywhere, and what is no division of its tensors.
Result<Index> read_index(std::string_view text);

/// One rank's files for the others, and together.
std::string text_of_files(const Index& part);
Status add_files(Index& index, std::string_view text);

/// The checkpoint in a folder.
Result<Index> open_index(const std::string& folder);
/// A folder of safetensors files that torch or others wrote, sharded or whole; without digests. A
/// folder with an index of muster's is opened by that.
Result<Index> open_safetensors(const std::string& folder);

}  // namespace muster::shards
