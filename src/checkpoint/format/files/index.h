/// The index of a checkpoint, muster.json: its tensors, where their pieces lie, and digests of
/// everything. A folder without it is no checkpoint.
///
///   checkpoint/
///     shard-00001-model-00001-of-00001.safetensors ...   the pieces that the ranks wrote
///     muster.json                                        written last
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/files/commit_record.h"
#include "checkpoint/format/plan/box.h"
#include "muster/status.h"

namespace muster::shards {

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
