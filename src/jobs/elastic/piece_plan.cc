// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/piece_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include "checkpoint/format/files/safetensors.h"

namespace muster::elastic {
namespace {

constexpr std::uint64_t kTensorAlignment = 64;

Status cannot(const std::string& why) {
  return {Code::invalid_argument, "elastic::ShardedState: " + why};
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  constexpr std::size_t kShown = 8;
  for (std::size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text += (i > 0 ? ", " : " ") + std::to_string(ranks[i]);
  return ranks.size() > kShown ? text + " and others" : text;
}

struct KnownCommit {
  int world_size = 1;
  bool is_agreed = false;
  std::set<int> ranks;

  std::vector<int> lost() const {
    std::vector<int> lost;
    for (int rank = 0; rank < world_size; ++rank)
      if (!ranks.contains(rank)) lost.push_back(rank);
    return lost;
  }
};

}  // namespace

Result<std::optional<CommitId>> newest_whole(std::span<const ReachablePart> parts) {
  std::map<CommitId, KnownCommit> commits;
  for (const ReachablePart& part : parts) {
    KnownCommit& commit = commits[part.id];
    commit.world_size = part.world_size;
    commit.is_agreed = commit.is_agreed || part.is_agreed != 0;
    commit.ranks.insert(part.rank);
  }
  for (auto newest = commits.rbegin(); newest != commits.rend(); ++newest) {
    const auto& [id, commit] = *newest;
    const std::vector<int> lost = commit.lost();
    if (lost.empty()) return std::optional(id);
    if (commit.is_agreed)
      return Status(Code::exhausted,
                    "elastic::ShardedState: commit " + std::to_string(id.number) +
                        " is lost: what " + listed(lost) + " of " +
                        std::to_string(commit.world_size) +
                        " had is gone with a host and with the one that kept its copy; load the "
                        "last checkpoint before elastic::run, with which the job begins again");
  }
  return std::optional<CommitId>();
}

std::vector<int> partners_of(std::span<const std::int64_t> nodes) {
  std::map<std::int64_t, std::vector<int>> ranks;
  for (std::size_t rank = 0; rank < nodes.size(); ++rank)
    ranks[nodes[rank]].push_back(static_cast<int>(rank));
  std::vector<int> partners(nodes.size(), -1);
  if (ranks.size() < 2) return partners;
  for (auto node = ranks.begin(); node != ranks.end(); ++node) {
    const auto after = std::next(node) == ranks.end() ? ranks.begin() : std::next(node);
    for (std::size_t i = 0; i < node->second.size(); ++i)
      partners[static_cast<std::size_t>(node->second[i])] = after->second[i % after->second.size()];
  }
  return partners;
}

std::uint64_t bytes_of(const shards::Shard& shard) {
  return static_cast<std::uint64_t>(shard.elements() * shards::element_bytes(shard.dtype));
}

std::vector<std::uint64_t> offsets_of(std::span<const shards::Shard> shards) {
  std::vector<std::uint64_t> offsets;
  std::uint64_t at = 0;
  for (const shards::Shard& shard : shards) {
    offsets.push_back(at);
    at += (bytes_of(shard) + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
  }
  return offsets;
}

std::uint64_t data_bytes_of(std::span<const shards::Shard> shards) {
  return shards.empty() ? 0 : offsets_of(shards).back() + bytes_of(shards.back());
}

Result<PieceMap> PieceMap::of(std::span<const PieceSource> sources) {
  PieceMap map;
  for (const PieceSource& source : sources) {
    const auto offsets = offsets_of(source.shards);
    for (std::size_t i = 0; i < source.shards.size(); ++i) {
      const shards::Shard& shard = source.shards[i];
      auto [found, is_new] = map.tensors_.try_emplace(shard.name);
      TensorPieces& tensor = found->second;
      if (is_new) tensor.whole = {shard.dtype, shard.sizes};
      if (tensor.whole.dtype != shard.dtype || tensor.whole.sizes != shard.sizes)
        return cannot("the ranks have tensors '" + shard.name + "' of different types or sizes");
      std::uint64_t at = offsets[i];
      for (const shards::Box& box : shard.boxes) {
        tensor.places[box].push_back({source.holder, source.memory, at});
        at += static_cast<std::uint64_t>(box.elements() * shards::element_bytes(shard.dtype));
      }
    }
  }
  return map;
}

std::map<std::string, PieceMap::CommittedTensor> PieceMap::tensors() const {
  std::map<std::string, CommittedTensor> all;
  for (const auto& [name, tensor] : tensors_) all.emplace(name, tensor.whole);
  return all;
}

// Receivers that could have a piece of several holders spread over them.
const PieceMap::PiecePlace& PieceMap::nearest(const std::vector<PiecePlace>& places, int receiver) {
  const auto own = std::ranges::find(places, receiver, &PiecePlace::holder);
  return own != places.end() ? *own : places[static_cast<std::size_t>(receiver) % places.size()];
}

Result<std::vector<PieceCopy>> PieceMap::copies(std::span<const shards::Shard> wanted,
                                                int receiver) const {
  std::vector<PieceCopy> copies;
  for (std::size_t number = 0; number < wanted.size(); ++number) {
    const shards::Shard& shard = wanted[number];
    const auto found = tensors_.find(shard.name);
    if (found == tensors_.end())
      return cannot("the last commit has no '" + shard.name +
                    "'; every rank must add the same in every epoch");
    const TensorPieces& tensor = found->second;
    if (tensor.whole.dtype != shard.dtype || tensor.whole.sizes != shard.sizes)
      return cannot("'" + shard.name + "' is " + tensor.whole.dtype + " " +
                    shards::text_of(tensor.whole.sizes) + " in the last commit, and " +
                    shard.dtype + " " + shards::text_of(shard.sizes) + " now");
    const auto width = static_cast<std::uint64_t>(shards::element_bytes(shard.dtype));
    std::uint64_t into = 0;
    for (const shards::Box& box : shard.boxes) {
      std::int64_t found_elements = 0;
      for (const auto& [held, places] : tensor.places) {
        const auto common = shards::intersection(held, box);
        if (!common) continue;
        const PiecePlace& from = nearest(places, receiver);
        found_elements += common->elements();
        shards::for_each_run(
            *common, held, box, [&](std::int64_t source, std::int64_t target, std::int64_t run) {
              copies.push_back({from.holder, from.memory, number,
                                from.at + static_cast<std::uint64_t>(source) * width,
                                into + static_cast<std::uint64_t>(target) * width,
                                static_cast<std::uint64_t>(run) * width});
            });
      }
      if (found_elements != box.elements())
        return cannot("the parts of '" + shard.name +
                      "' that the ranks had do not make up the tensor once");
      into += static_cast<std::uint64_t>(box.elements()) * width;
    }
  }
  return copies;
}

}  // namespace muster::elastic
