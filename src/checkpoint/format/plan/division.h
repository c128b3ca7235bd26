// SPDX-License-Identifier: BSD-3-Clause
/// Divides the writing of tensors: from the parts that each rank has of each tensor, it computes
/// which rank writes which piece into which file. Every rank computes the same from the claims of
/// all: no rank decides for others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/plan/box.h"
#include "muster/status.h"

namespace muster::shards {

/// A rank's part of a tensor. In its memory the boxes lie one behind the other, each row-major.
struct Shard {
  std::string name;
  std::string dtype;  ///< safetensors' name of the element type: "F32"
  Extent sizes;       ///< of the whole tensor
  std::vector<Box> boxes;

  std::int64_t elements() const;
  bool operator==(const Shard&) const = default;
};

/// As text for the other ranks, and back. `read_shards` refuses what no `text_of_shards` gave.
std::string text_of_shards(const std::vector<Shard>& shards);
Result<std::vector<Shard>> read_shards(std::string_view text);

/// A box that one rank writes into a file.
struct WrittenPiece {
  std::string name, dtype;
  Extent sizes;
  Box box;
  std::int64_t first_element = 0;  ///< of the box in the memory of the rank's Shard
};

struct WrittenFile {
  int rank = 0;
  std::string file;  ///< "shard-00001-model-00001-of-00001.safetensors"
  std::vector<WrittenPiece> pieces;
};

/// `ranks[r]`: what rank r has. A box that several ranks have is written by the one with the fewest
/// bytes so far. A file holds at most one piece of a tensor, as the format has one entry for a
/// name; a rank whose part of a tensor is k boxes writes k files. Fails naming tensor and ranks
/// where they disagree on its type or sizes, or where together they do not have each element
/// exactly once.
Result<std::vector<WrittenFile>> plan_files(const std::vector<std::vector<Shard>>& ranks);

}  // namespace muster::shards
