// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/convert.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/files/safetensors.h"
#include "checkpoint/format/load.h"
#include "checkpoint/format/save.h"
#include "core/security/secret.h"
#include "core/tunables/tunables_fixed.h"

namespace muster::shards {
namespace {

struct Exported {
  std::string name;  ///< in the checkpoint
  HeaderEntry entry;
};

std::string file_name(std::size_t number, std::size_t count) {
  if (count == 1) return "model.safetensors";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "model-%05zu-of-%05zu.safetensors", number, count);
  return text.data();
}

Status write_whole(Reader& reader, const std::string& path, std::vector<Exported>& tensors) {
  std::vector<HeaderEntry> entries;
  for (const Exported& each : tensors) {
    entries.push_back(each.entry);
    give_type_of_files(entries.back());
  }
  const std::string header = write_header(entries, /*sharded=*/false);
  auto file = FileWriter::create(path);
  if (!file) return file.status();
  if (Status done = file->write(std::as_bytes(std::span(header))); !done) return done;
  std::vector<std::byte> bytes;
  for (const Exported& each : tensors) {
    const Extent& sizes = each.entry.box.sizes;
    const std::int64_t width = element_bytes(each.entry.dtype), all = each.entry.box.elements();
    for (std::int64_t at = 0; at < all;) {  // sizes in a file may be anything: a part at a time
      const std::int64_t count = std::min(all - at, fixed::kConvertedPart / width);
      bytes.resize(static_cast<std::size_t>(count * width));
      const Shard part{each.name, each.entry.dtype, sizes, boxes_of_stretch(sizes, at, count)};
      if (Status done = reader.read(part, bytes); !done) return done;
      if (Status done = file->write(bytes); !done) return done;
      at += count;
    }
  }
  return file->close(/*durable=*/true);
}

/// The path of a new folder.
Result<std::string> new_folder(const std::string& name) {
  auto path = local_path(name);
  if (path.ok() && exists(*path))
    return Status(Code::invalid_argument,
                  "checkpoint: " + *path + " is there already: give the name of a new folder");
  return path;
}

/// Writes the files and, last, their index.
Status write_export(const Index& index, const std::string& folder,
                    std::vector<std::vector<Exported>>& files, std::int64_t total) {
  Reader reader(index);
  nlohmann::json map = nlohmann::json::object();
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string name = file_name(i + 1, files.size());
    if (Status done = write_whole(reader, folder + "/" + name, files[i]); !done) return done;
    for (const Exported& each : files[i]) map[each.entry.name] = name;
  }
  const nlohmann::json text{{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  return write_text(folder + "/model.safetensors.index.json", text.dump(2) + "\n", true);
}

}  // namespace

Status check_room(const std::string& folder, std::uint64_t bytes) {
  std::error_code error;
  std::string there = folder;
  while (!exists(there) && folder_of(there) != there) there = folder_of(there);
  const auto room = std::filesystem::space(there, error);
  if (error || bytes <= room.available) return {};
  return {Code::exhausted, "checkpoint: " + std::to_string(bytes) +
                               " bytes are to be written, and " + there + " has room for " +
                               std::to_string(room.available)};
}

Status export_whole(const Index& index, const std::string& to, const ExportOptions& options) {
  const auto folder = new_folder(to);
  if (!folder) return folder.status();
  std::vector<std::vector<Exported>> files;
  std::int64_t in_file = 0, total = 0;
  for (const auto& [name, tensor] : index.tensors) {
    if (!name.starts_with(options.prefix) || name.size() == options.prefix.size()) continue;
    const Box whole = box_of(tensor.sizes);
    const std::int64_t bytes = whole.elements() * element_bytes(tensor.dtype);
    if (files.empty() || in_file + bytes > options.file_bytes) {
      files.emplace_back();
      in_file = 0;
    }
    files.back().push_back({name, {name.substr(options.prefix.size()), tensor.dtype, whole, 0, 0}});
    in_file += bytes;
    total += bytes;
  }
  if (files.empty())
    return {Code::invalid_argument, "checkpoint: " + index.folder +
                                        " has no tensor whose name "
                                        "begins with '" +
                                        options.prefix + "'"};
  if (Status room = check_room(folder_of(*folder), static_cast<std::uint64_t>(total)); !room)
    return room;
  // Nobody else has this name, and the folder must not be there when it takes its own.
  const std::string staging = *folder + "." + random_name(8) + ".writing";
  if (Status made = make_folder(folder_of(staging)); !made) return made;
  if (Status made = make_new_folder(staging); !made) return made;
  Status done = write_export(index, staging, files, total);
  if (done.ok()) done = sync_folder(staging);
  if (done.ok()) done = put_in_place(staging, *folder, /*replaces=*/false);
  if (!done) {
    std::error_code error;
    std::filesystem::remove_all(staging, error);
    return done;
  }
  return sync_folder(folder_of(*folder));
}

Status import_safetensors(const Index& index, const std::string& to) {
  const auto folder = new_folder(to);
  if (!folder) return folder.status();
  if (Status room = check_room(folder_of(*folder), index.bytes()); !room) return room;
  std::vector<Shard> shards;
  std::map<std::pair<std::string, Box>, const StoredPiece*> pieces;
  for (const auto& [name, tensor] : index.tensors) {
    shards.push_back({name, tensor.dtype, tensor.sizes, {}});
    for (const StoredPiece& piece : tensor.pieces) {
      shards.back().boxes.push_back(piece.box);
      pieces[{name, piece.box}] = &piece;
    }
  }
  const CommitOptions options{.path = *folder, .step = {}, .overwrite = false};
  const auto plan = plan_save(shards, options, {});
  if (!plan) return plan.status();
  Reader reader(index);
  return finish_save(*plan,
                     [&](const WrittenPiece& piece, std::uint64_t at, std::span<std::byte> bytes) {
                       const auto found = pieces.find({piece.name, piece.box});
                       if (found == pieces.end()) return Status();  // of a tensor without elements
                       return reader.read_piece(piece.name, *found->second, at, bytes);
                     },
                     "{}", {});
}

}  // namespace muster::shards
