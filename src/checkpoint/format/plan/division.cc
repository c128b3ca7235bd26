// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/plan/division.h"

#include <array>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/format/files/json_text.h"
#include "checkpoint/format/files/safetensors.h"

namespace muster::shards {
namespace {

using nlohmann::json;

Status refuse_shard(const std::string& name, const std::string& why) {
  return {Code::invalid_argument, "checkpoint: tensor '" + name + "': " + why};
}

std::string file_name(std::size_t number) {
  std::array<char, 80> text{};
  std::snprintf(text.data(), text.size(), "shard-%05zu-model-00001-of-00001.safetensors", number);
  return text.data();
}

struct HeldPiece {
  std::vector<std::pair<int, std::int64_t>> holders;  // rank, first element in its memory
};
struct Tensor {
  const Shard* first = nullptr;
  int first_rank = 0;
  std::map<Box, HeldPiece> pieces;
};

Result<std::map<std::string, Tensor>> collect(const std::vector<std::vector<Shard>>& ranks) {
  std::map<std::string, Tensor> tensors;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const int rank = static_cast<int>(r);
    for (const Shard& shard : ranks[r]) {
      Tensor& tensor = tensors[shard.name];
      if (tensor.first == nullptr) {
        tensor.first = &shard;
        tensor.first_rank = rank;
      }
      if (shard.dtype != tensor.first->dtype || shard.sizes != tensor.first->sizes)
        return refuse_shard(shard.name, "rank " + std::to_string(tensor.first_rank) + " has " +
                                            tensor.first->dtype + " " +
                                            text_of(tensor.first->sizes) + " and rank " +
                                            std::to_string(rank) + " has " + shard.dtype + " " +
                                            text_of(shard.sizes) +
                                            "; the whole tensor must be the same on all ranks");
      std::int64_t at = 0;
      for (const Box& box : shard.boxes) {
        auto& holders = tensor.pieces[box].holders;
        if (!holders.empty() && holders.back().first == rank)
          return refuse_shard(shard.name, "rank " + std::to_string(rank) +
                                              " gives it twice; names in a state must differ");
        holders.emplace_back(rank, at);
        at += box.elements();
      }
    }
  }
  for (auto& [name, tensor] : tensors) {
    if (tensor.pieces.empty() && element_count(tensor.first->sizes) == 0)
      tensor.pieces[box_of(tensor.first->sizes)].holders.emplace_back(tensor.first_rank, 0);
    std::vector<Box> boxes;
    for (const auto& [box, piece] : tensor.pieces) boxes.push_back(box);
    if (const std::string error = division_error(tensor.first->sizes, std::move(boxes));
        !error.empty())
      return refuse_shard(name, error + "; the ranks' parts must make the whole tensor");
  }
  return tensors;
}

}  // namespace

std::int64_t Shard::elements() const {
  std::int64_t sum = 0;
  for (const Box& box : boxes) sum += box.elements();
  return sum;
}

std::string text_of_shards(const std::vector<Shard>& shards) {
  json all = json::array();
  for (const Shard& shard : shards) {
    json boxes = json::array();
    for (const Box& box : shard.boxes) boxes.push_back({box.offsets, box.sizes});
    all.push_back({shard.name, shard.dtype, shard.sizes, std::move(boxes)});
  }
  return all.dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<std::vector<Shard>> read_shards(std::string_view text) {
  try {
    std::vector<Shard> shards;
    for (const json& each : json::parse(text)) {
      Shard shard{each.at(0), each.at(1), extent_of(each.at(2)), {}};
      for (const json& box : each.at(3))
        shard.boxes.push_back({extent_of(box.at(0)), extent_of(box.at(1))});
      if (element_bytes(shard.dtype) == 0)
        return refuse_shard(shard.name, "'" + shard.dtype + "' is no element type");
      shards.push_back(std::move(shard));
    }
    return shards;
  } catch (const json::exception& error) {
    return Status(Code::invalid_argument,
                  std::string("checkpoint: what a rank tells of its tensors is not understood: ") +
                      error.what());
  }
}

Result<std::vector<WrittenFile>> plan_files(const std::vector<std::vector<Shard>>& ranks) {
  auto collected = collect(ranks);
  if (!collected) return collected.status();
  struct Choice {
    const Tensor* tensor;
    const Box* box;
    const HeldPiece* piece;
    std::int64_t bytes;
  };
  std::vector<std::int64_t> bytes(ranks.size(), 0);
  std::vector<Choice> shared;
  std::map<const HeldPiece*, std::pair<int, std::int64_t>> writer;
  for (const auto& [name, tensor] : *collected)
    for (const auto& [box, piece] : tensor.pieces) {
      const std::int64_t size = box.elements() * element_bytes(tensor.first->dtype);
      if (piece.holders.size() == 1) {
        writer[&piece] = piece.holders.front();
        bytes[static_cast<std::size_t>(piece.holders.front().first)] += size;
      } else {
        shared.push_back({&tensor, &box, &piece, size});
      }
    }
  // The largest first: small ones then even out what the ranks write.
  std::stable_sort(shared.begin(), shared.end(),
                   [](const Choice& a, const Choice& b) { return a.bytes > b.bytes; });
  for (const Choice& choice : shared) {
    const auto& holders = choice.piece->holders;
    const auto least =
        std::min_element(holders.begin(), holders.end(), [&](const auto& a, const auto& b) {
          return bytes[static_cast<std::size_t>(a.first)] <
                 bytes[static_cast<std::size_t>(b.first)];
        });
    writer[choice.piece] = *least;
    bytes[static_cast<std::size_t>(least->first)] += choice.bytes;
  }
  std::vector<std::vector<WrittenFile>> of_ranks(ranks.size());
  for (const auto& [name, tensor] : *collected) {
    std::map<int, std::size_t> written;  // of this tensor, by each rank
    for (const auto& [box, piece] : tensor.pieces) {
      const auto [rank, first_element] = writer.at(&piece);
      auto& files = of_ranks[static_cast<std::size_t>(rank)];
      const std::size_t file = written[rank]++;
      if (file == files.size()) files.push_back({.rank = rank, .file = {}, .pieces = {}});
      files[file].pieces.push_back(
          {name, tensor.first->dtype, tensor.first->sizes, box, first_element});
    }
  }
  std::vector<WrittenFile> files;
  for (auto& of_rank : of_ranks)
    for (WrittenFile& file : of_rank) {
      file.file = file_name(files.size() + 1);
      files.push_back(std::move(file));
    }
  return files;
}

}  // namespace muster::shards
