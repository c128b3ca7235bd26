#include "muster/shards/convert.h"

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "muster/shards/files/disk.h"
#include "muster/shards/files/safetensors.h"
#include "muster/shards/load.h"
#include "muster/shards/plan/element_type.h"
#include "muster/shards/save.h"

namespace muster::shards {
namespace {

/// What an export is called until it is whole.
constexpr const char* kWriting = ".writing";

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
  for (const Exported& each : tensors) entries.push_back(each.entry);
  const std::string header = write_header(entries, /*sharded=*/false);
  auto file = FileWriter::create(path);
  if (!file) return file.status();
  if (Status done = file->write(std::as_bytes(std::span(header))); !done) return done;
  std::vector<std::byte> bytes;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    bytes.resize(entries[i].end - entries[i].begin);
    const Extent& sizes = entries[i].box.sizes;
    const Shard whole{tensors[i].name, entries[i].dtype, sizes, {box_of(sizes)}};
    if (Status done = reader.read(whole, bytes); !done) return done;
    if (Status done = file->write(bytes); !done) return done;
  }
  return file->close(/*durable=*/true);
}

Status refuse_existing(const std::string& folder) {
  if (!exists(folder)) return {};
  return {Code::invalid_argument,
          "checkpoint: " + folder + " is there already: give the name of a new folder"};
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

Status export_whole(const Index& index, const std::string& folder, const ExportOptions& options) {
  if (Status free = refuse_existing(folder); !free) return free;
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
  const std::string staging = without_slash(folder) + kWriting;
  if (exists(staging))
    return {Code::invalid_argument, "checkpoint: " + staging +
                                        " is there already: another export writes it, or one that "
                                        "was killed has left it; remove it where none runs"};
  if (Status made = make_folder(staging); !made) return made;
  Status done = write_export(index, staging, files, total);
  if (done.ok()) done = put_in_place(staging, without_slash(folder));
  if (!done) static_cast<void>(remove_folder(staging));
  return done;
}

Status import_safetensors(const Index& index, const std::string& folder) {
  if (Status free = refuse_existing(folder); !free) return free;
  std::vector<Shard> shards;
  std::vector<std::vector<std::byte>> memory;
  std::vector<const std::byte*> data;
  Reader reader(index);
  for (const auto& [name, tensor] : index.tensors) {
    shards.push_back({name, tensor.dtype, tensor.sizes, {box_of(tensor.sizes)}});
    memory.emplace_back(
        static_cast<std::size_t>(shards.back().elements() * element_bytes(tensor.dtype)));
    if (Status done = reader.read(shards.back(), memory.back()); !done) return done;
  }
  for (const auto& each : memory) data.push_back(each.data());
  return save(shards, data, "{}", {.path = folder, .step = {}}, {});
}

}  // namespace muster::shards
