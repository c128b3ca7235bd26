// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/files/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/format/files/json_text.h"

namespace muster::shards {
namespace {

using nlohmann::json;

constexpr const char* kMetadata = "__metadata__";
constexpr const char* kSharding = "DCP_SHARDING_INFO";
constexpr const char* kOffsets = "saved_offsets";

Status refuse_header(const std::string& why) { return {Code::invalid_argument, why}; }
Status refuse_tensor(const std::string& name, const std::string& why) {
  return refuse_header("tensor '" + name + "' " + why);
}

/// An exact list of whole numbers, none negative.
bool read_extent(const json& list, Extent& extent) {
  if (!list.is_array()) return false;
  for (const json& each : list) {
    if (!each.is_number_unsigned() || each.get<std::uint64_t>() > (std::uint64_t{1} << 61))
      return false;
    extent.push_back(each.get<std::int64_t>());
  }
  return true;
}

Status read_entry(const std::string& name, const json& value, HeaderEntry& entry) {
  entry.name = name;
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") ||
      !value.contains("shape") || !value.contains("data_offsets") || !value["dtype"].is_string())
    return refuse_tensor(name, "has not exactly dtype, shape and data_offsets");
  entry.dtype = value["dtype"].get<std::string>();
  const std::int64_t width = element_bytes(entry.dtype);
  if (width == 0) return refuse_tensor(name, "has the unknown type '" + entry.dtype + "'");
  Extent place;
  if (!read_extent(value["shape"], entry.box.sizes) || !read_extent(value["data_offsets"], place) ||
      place.size() != 2)
    return refuse_tensor(name, "has a shape or data_offsets that are no whole numbers");
  entry.box.offsets = Extent(entry.box.sizes.size(), 0);
  entry.begin = static_cast<std::uint64_t>(place[0]);
  entry.end = static_cast<std::uint64_t>(place[1]);
  const auto elements = element_count(entry.box.sizes);
  if (!elements || *elements > (std::int64_t{1} << 58) || entry.end < entry.begin ||
      entry.end - entry.begin != static_cast<std::uint64_t>(*elements * width))
    return refuse_tensor(name, "has " + entry.dtype + " " + text_of(entry.box.sizes) +
                                   " in the bytes " + std::to_string(entry.begin) + " to " +
                                   std::to_string(entry.end));
  return {};
}

Status read_sharding(const json& metadata, std::vector<HeaderEntry>& entries) {
  if (!metadata.is_object()) return refuse_header("__metadata__ is no object of texts");
  for (const json& each : metadata)
    if (!each.is_string()) return refuse_header("__metadata__ is no object of texts");
  const auto found = metadata.find(kSharding);
  if (found == metadata.end()) return {};
  const auto sharding = parse_object(found->get_ref<const std::string&>());
  if (!sharding) return sharding.status().with_context("DCP_SHARDING_INFO");
  for (HeaderEntry& entry : entries) {
    const auto of = sharding->find(entry.name);
    Extent offsets;
    if (of == sharding->end() || !of->is_object() || !of->contains(kOffsets) ||
        !read_extent((*of)[kOffsets], offsets) || offsets.size() != entry.box.sizes.size())
      return refuse_tensor(entry.name, "has no offsets of its dimensions in DCP_SHARDING_INFO");
    entry.box.offsets = std::move(offsets);
  }
  return {};
}

}  // namespace

std::uint64_t length_in(std::string_view file) {
  std::uint64_t length = 0;
  for (std::size_t i = std::min<std::size_t>(kLengthBytes, file.size()); i-- > 0;)
    length = length << 8 | static_cast<unsigned char>(file[i]);
  return length;
}

void give_type_of_files(HeaderEntry& entry) {
  const ElementRow row = element_row(entry.dtype);
  if (row.in_files.empty()) return;
  if (element_bytes(row.in_files) != row.bytes || row.in_files == "U8") {
    entry.box.sizes.push_back(row.bytes);
    entry.box.offsets.push_back(0);
  }
  entry.dtype = row.in_files;
}

std::string write_header(std::vector<HeaderEntry>& entries, bool sharded) {
  json header = json::object(), sharding = json::object();
  header[kMetadata] = {{"format", "pt"}};
  std::uint64_t at = 0;
  for (HeaderEntry& entry : entries) {
    entry.begin = at;
    at += static_cast<std::uint64_t>(entry.box.elements() * element_bytes(entry.dtype));
    entry.end = at;
    header[entry.name] = {{"dtype", entry.dtype},
                          {"shape", entry.box.sizes},
                          {"data_offsets", {entry.begin, entry.end}}};
    sharding[entry.name][kOffsets] = entry.box.offsets;
  }
  if (sharded) {
    header[kMetadata]["DCP_VERSION"] = "1.0";
    header[kMetadata][kSharding] = sharding.dump(-1, ' ', false, json::error_handler_t::replace);
  }
  std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  std::string length(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  return length + text;
}

Result<std::vector<HeaderEntry>> read_header(std::string_view text, std::uint64_t data_bytes) {
  if (text.empty() || text.front() != '{') return refuse_header("the header is no JSON object");
  const auto header = parse_object(text);
  if (!header) return header.status().with_context("the header");
  std::vector<HeaderEntry> entries;
  for (const auto& [name, value] : header->items()) {
    if (name == kMetadata) continue;
    entries.emplace_back();
    if (Status read = read_entry(name, value, entries.back()); !read) return read;
  }
  if (const auto metadata = header->find(kMetadata); metadata != header->end())
    if (Status read = read_sharding(*metadata, entries); !read) return read;
  std::sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::uint64_t at = 0;
  for (const HeaderEntry& entry : entries) {
    if (entry.begin != at)
      return refuse_tensor(entry.name,
                           (entry.begin < at ? "overlaps the one before: it begins at byte "
                                             : "leaves bytes before it to nobody: it begins "
                                               "at byte ") +
                               std::to_string(entry.begin) + " and not at " + std::to_string(at));
    if (entry.end > data_bytes)
      return refuse_tensor(entry.name,
                           "ends at byte " + std::to_string(entry.end) + " of the " +
                               std::to_string(data_bytes) +
                               " that the file has behind its header: the file is cut off");
    at = entry.end;
  }
  if (at != data_bytes)
    return refuse_header("the tensors end at byte " + std::to_string(at) + " of the " +
                         std::to_string(data_bytes) + " that the file has behind its header");
  return entries;
}

}  // namespace muster::shards
