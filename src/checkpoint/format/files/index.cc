// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/files/index.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "checkpoint/format/files/digest.h"
#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/files/json_text.h"
#include "checkpoint/format/files/safetensors.h"

namespace muster::shards {
namespace {

using nlohmann::json;

/// How an index begins. Its keys are sorted, and "commit" is the first of them; in versions without
/// it, the time was.
constexpr std::string_view kRecordBegins = "{\n \"commit\": ", kRecordEnds = "\n },\n";
constexpr std::string_view kTimeBegins = "{\n \"committed_ns\": ";
constexpr std::string_view kFilesBegin = "{\n \"files\": ";  // still older ones
constexpr std::size_t kLongestRecord = 8192;  // limit: the name of a folder has 255 bytes
constexpr std::size_t kLaunchesBefore = 32;   // limit: what a record has room for

json json_without_digest(const CommitRecord& record) {
  json all{{"number", record.number},
           {"token", record.token},
           {"name", record.name},
           {"job", record.job},
           {"epoch", record.epoch}};
  if (!record.launch.empty()) all["launch"] = record.launch;
  if (!record.before.empty()) all["before"] = record.before;
  if (record.step) all["step"] = *record.step;
  return all;
}

std::string digest_of_record(const json& without_digest) {
  return digest_of(without_digest.dump(-1, ' ', false, json::error_handler_t::replace));
}

Status altered(const std::string& path) {
  return {Code::invalid_argument, "checkpoint: the beginning of " + path + " is altered"};
}

}  // namespace

std::string CommitRecord::saver_text() const {
  if (epoch == 0) return "another saver";
  return "epoch " + std::to_string(epoch) + (job.empty() ? "" : " of job '" + job + "'");
}

bool CommitRecord::was_left_behind_by(const CommitRecord& other) const {
  return !launch.empty() && job == other.job && std::ranges::count(other.before, launch) > 0;
}

void CommitRecord::go_on_from(const CommitRecord& other) {
  if (job != other.job) return;
  std::vector<std::string> earlier = other.before;
  earlier.push_back(other.launch);
  std::erase_if(earlier, [this](const std::string& each) {
    return each.empty() || each == launch || std::ranges::count(before, each) > 0;
  });
  before.insert(before.begin(), earlier.begin(), earlier.end());
  if (before.size() > kLaunchesBefore) before.erase(before.begin(), before.end() - kLaunchesBefore);
}

json json_of(const CommitRecord& record) {
  json all = json_without_digest(record);
  all["digest"] = digest_of_record(all);
  return all;
}

Result<CommitRecord> record_in(const json& commit) {
  try {
    CommitRecord record;
    record.number = whole_number<std::int64_t>(commit.at("number"));
    record.token = commit.at("token");
    record.name = commit.at("name");
    record.job = commit.at("job");
    record.epoch = whole_number<std::int64_t>(commit.at("epoch"));
    if (commit.contains("launch")) record.launch = commit.at("launch");
    if (commit.contains("before")) record.before = commit.at("before");
    if (commit.contains("step")) record.step = whole_number<std::int64_t>(commit.at("step"));
    if (commit.at("digest") != digest_of_record(json_without_digest(record)))
      return Status(Code::invalid_argument, "the record of the commit does not fit its digest");
    return record;
  } catch (const json::exception& error) {
    return Status(Code::invalid_argument, error.what());
  }
}

Result<CommitRecord> read_record(const std::string& folder) {
  const std::string path = folder + "/" + kIndexName;
  const auto file = FileReader::open(path);
  if (!file) return file.status();
  std::string text(std::min<std::uint64_t>(file->bytes(), kLongestRecord), '\0');
  if (Status read = file->read_at(0, std::as_writable_bytes(std::span(text))); !read) return read;
  if (text.starts_with(kRecordBegins)) {
    const std::size_t end = text.find(kRecordEnds);
    if (end == std::string::npos) return altered(path);
    const std::string_view record =
        std::string_view(text).substr(kRecordBegins.size(), end + 3 - kRecordBegins.size());
    const json parsed = json::parse(record, nullptr, /*allow_exceptions=*/false);
    if (!parsed.is_object()) return altered(path);
    return record_in(parsed);
  }
  CommitRecord record;
  if (text.starts_with(kFilesBegin)) {
    record.committed_ns = changed_ns(path);
    return record;
  }
  if (!text.starts_with(kTimeBegins)) return altered(path);
  const char* const digits = text.data() + kTimeBegins.size();
  const auto read = std::from_chars(digits, text.data() + text.size(), record.committed_ns);
  if (read.ec != std::errc() || record.committed_ns < 0) return altered(path);
  return record;
}

namespace {

constexpr const char* kFormat = "muster checkpoint 2";
/// Without digests of blocks and without a record of the commit.
constexpr const char* kFirstFormat = "muster checkpoint 1";
constexpr std::uint64_t kIndexLimit = 1'000'000'000;
constexpr std::size_t kDigits = 32;

Status refuse_index(const std::string& why) { return {Code::invalid_argument, why}; }

json json_of_files(const Index& index) {
  json files = json::object(), tensors = json::object();
  for (const auto& [name, file] : index.files)
    files[name] = {{"bytes", file.bytes},
                   {"header_bytes", file.header_bytes},
                   {"header_digest", file.header_digest}};
  for (const auto& [name, tensor] : index.tensors) {
    json pieces = json::array();
    for (const StoredPiece& piece : tensor.pieces)
      pieces.push_back({{"file", piece.file},
                        {"offsets", piece.box.offsets},
                        {"shape", piece.box.sizes},
                        {"at", piece.at},
                        {"blocks", piece.blocks}});
    tensors[name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.sizes}, {"pieces", std::move(pieces)}};
  }
  return {{"files", std::move(files)}, {"tensors", std::move(tensors)}};
}

/// Throws json::exception.
Status merge_files(Index& index, const json& text) {
  for (const auto& [name, file] : text.at("files").items()) {
    if (name.empty() || name.find('/') != std::string::npos || name == "." || name == "..")
      return refuse_index("'" + name + "' is no name of a file in the checkpoint's folder");
    index.files[name] = {whole_number<std::uint64_t>(file.at("bytes")),
                         whole_number<std::uint64_t>(file.at("header_bytes")),
                         file.at("header_digest")};
  }
  for (const auto& [name, stored] : text.at("tensors").items()) {
    StoredTensor& tensor = index.tensors[name];
    tensor.dtype = stored.at("dtype");
    tensor.sizes = extent_of(stored.at("shape"));
    for (const json& piece : stored.at("pieces"))
      tensor.pieces.push_back({piece.at("file"),
                               {extent_of(piece.at("offsets")), extent_of(piece.at("shape"))},
                               whole_number<std::uint64_t>(piece.at("at")),
                               piece.value("digest", ""),
                               piece.value("blocks", "")});
  }
  return {};
}

Status check_tensor(const Index& index, const std::string& name, const StoredTensor& tensor) {
  const std::int64_t width = element_bytes(tensor.dtype);
  if (width == 0) return refuse_index("tensor '" + name + "' has the unknown type " + tensor.dtype);
  std::vector<Box> boxes;
  for (const StoredPiece& piece : tensor.pieces) boxes.push_back(piece.box);
  if (const std::string error = division_error(tensor.sizes, boxes); !error.empty())
    return refuse_index("tensor '" + name + "': " + error);
  for (const StoredPiece& piece : tensor.pieces) {
    const auto file = index.files.find(piece.file);
    if (file == index.files.end())
      return refuse_index("tensor '" + name + "' lies in " + piece.file +
                          ", which is none of the files");
    const auto elements = static_cast<std::uint64_t>(piece.box.elements());
    const std::uint64_t data = file->second.bytes - std::min(file->second.bytes, piece.at);
    if (piece.at < file->second.header_bytes || elements > data / static_cast<std::uint64_t>(width))
      return refuse_index("tensor '" + name + "' lies outside of " + piece.file);
    const std::uint64_t bytes = elements * static_cast<std::uint64_t>(width);
    if (!piece.blocks.empty() && !BlockDigests::fits(piece.blocks, bytes))
      return refuse_index("tensor '" + name + "' has digests of another number of blocks than of " +
                          "its piece in " + piece.file);
  }
  return {};
}

Status check_tensors(const Index& index) {
  for (const auto& [name, tensor] : index.tensors)
    if (Status good = check_tensor(index, name, tensor); !good) return good;
  return {};
}

/// Adds what the header of one file names.
Status add_header(Index& index, const std::string& name) {
  const auto file = FileReader::open(index.folder + "/" + name);
  if (!file) return file.status();
  std::string length(kLengthBytes, '\0');
  if (Status read = file->read_at(0, std::as_writable_bytes(std::span(length))); !read) return read;
  const std::uint64_t bytes = length_in(length);
  if (bytes > kHeaderLimit || bytes > file->bytes() - kLengthBytes)
    return refuse_index("the header would have " + std::to_string(bytes) + " bytes: it is damaged");
  std::string text(bytes, '\0');
  if (Status read = file->read_at(kLengthBytes, std::as_writable_bytes(std::span(text))); !read)
    return read;
  const std::uint64_t header_bytes = kLengthBytes + bytes;
  auto entries = read_header(text, file->bytes() - header_bytes);
  if (!entries) return entries.status();
  index.files[name] = {file->bytes(), header_bytes, digest_of(length + text)};
  for (const HeaderEntry& entry : *entries) {
    StoredTensor& tensor = index.tensors[entry.name];
    if (tensor.pieces.empty()) {
      tensor.dtype = entry.dtype;
      tensor.sizes = Extent(entry.box.sizes.size(), 0);
    }
    if (tensor.dtype != entry.dtype || tensor.sizes.size() != entry.box.sizes.size())
      return refuse_index("tensor '" + entry.name +
                          "' has another type or other dimensions than in " +
                          tensor.pieces.front().file);
    for (std::size_t d = 0; d < tensor.sizes.size(); ++d)
      tensor.sizes[d] = std::max(tensor.sizes[d], entry.box.offsets[d] + entry.box.sizes[d]);
    tensor.pieces.push_back({name, entry.box, header_bytes + entry.begin, {}, {}});
  }
  return {};
}

}  // namespace

std::uint64_t Index::bytes() const {
  std::uint64_t sum = 0;
  for (const auto& [name, file] : files) sum += file.bytes;
  return sum;
}

std::string text_of_index(const Index& index) {
  json all = json_of_files(index);
  all["format"] = kFormat;
  all["world_size"] = index.world_size;
  all["saved_at"] = index.saved_at;
  CommitRecord record = index.commit;
  record.step = index.step;
  all["commit"] = json_of(record);
  all["values"] = json::parse(index.values, nullptr, false);
  std::string text = all.dump(1, ' ', false, json::error_handler_t::replace);
  text.resize(text.size() - 2);  // without "\n}"
  return text + ",\n \"digest\": \"" + digest_of(text) + "\"\n}\n";
}

Result<Index> read_index(std::string_view text) {
  const std::string_view before = ",\n \"digest\": \"", after = "\"\n}\n";
  const std::size_t ending = before.size() + kDigits + after.size();
  if (text.size() < ending || !text.ends_with(after) ||
      text.substr(text.size() - ending, before.size()) != before)
    return refuse_index("it does not end with its digest: it is cut off or altered");
  const std::string_view signed_text = text.substr(0, text.size() - ending);
  if (digest_of(signed_text) != text.substr(text.size() - ending + before.size(), kDigits))
    return refuse_index("it does not fit its digest: it is altered");
  const auto parsed = parse_object(text);
  if (!parsed) return parsed.status();
  try {
    const json& all = *parsed;
    if (all.at("format") != kFormat && all.at("format") != kFirstFormat)
      return refuse_index("its format is " + all.at("format").dump() + " and not '" + kFormat +
                          "'");
    Index index;
    index.world_size = whole_number<int>(all.at("world_size"));
    index.saved_at = all.at("saved_at");
    if (all.at("format") == kFormat) {
      auto record = record_in(all.at("commit"));
      if (!record) return record.status();
      index.commit = std::move(*record);
      index.step = index.commit.step;
    } else if (all.contains("committed_ns")) {
      index.commit.committed_ns = whole_number<std::int64_t>(all.at("committed_ns"));
    }
    index.digest = digest_of(signed_text);
    index.values = all.at("values").dump();
    if (all.contains("step")) index.step = whole_number<std::int64_t>(all.at("step"));
    if (Status added = merge_files(index, all); !added) return added;
    if (Status good = check_tensors(index); !good) return good;
    return index;
  } catch (const json::exception& error) {
    return refuse_index(error.what());
  }
}

std::string text_of_files(const Index& part) {
  return json_of_files(part).dump(-1, ' ', false, json::error_handler_t::replace);
}

Status add_files(Index& index, std::string_view text) {
  try {
    return merge_files(index, json::parse(text));
  } catch (const json::exception& error) {
    return refuse_index(
        std::string("checkpoint: what a rank tells of its files is not understood: ") +
        error.what());
  }
}

Result<Index> open_index(const std::string& name) {
  const auto local = local_path(name);
  if (!local) return local.status();
  const std::string& folder = *local;
  const std::string path = folder + "/" + kIndexName;
  if (!exists(path))
    return Status(
        Code::invalid_argument,
        "checkpoint: " + folder +
            (exists(folder) ? " is no checkpoint: it has no muster.json, which is written last, so "
                              "that saving it was interrupted or others wrote it; a folder of "
                              "safetensors files is read as such where that is asked for"
                            : " is not there"));
  const auto text = read_text(path, kIndexLimit);
  if (!text) return text.status();
  auto index = read_index(*text);
  if (!index) return index.status().with_context("checkpoint: " + path);
  index->folder = folder;
  return index;
}

Result<Index> open_safetensors(const std::string& name) {
  const auto local = local_path(name);
  if (!local) return local.status();
  const std::string& folder = *local;
  if (exists(folder + "/" + kIndexName)) return open_index(folder);
  Index index;
  index.folder = folder;
  std::vector<std::string> names;
  std::error_code error;
  for (auto at = std::filesystem::directory_iterator(index.folder, error);
       !error && at != std::filesystem::directory_iterator(); at.increment(error))
    if (at->path().extension() == ".safetensors") names.push_back(at->path().filename().string());
  if (error || names.empty())
    return Status(
        Code::invalid_argument,
        "checkpoint: " + folder + (error ? ": " + error.message() : " has no .safetensors file"));
  std::sort(names.begin(), names.end());
  for (const std::string& file : names)
    if (Status added = add_header(index, file); !added)
      return added.with_context("checkpoint: " + index.folder + "/" + file);
  if (Status good = check_tensors(index); !good)
    return good.with_context("checkpoint: " + index.folder);
  index.digest = digest_of(text_of_files(index));
  return index;
}

}  // namespace muster::shards
