#include "checkpoint/format/files/commit_record.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

#include "checkpoint/format/files/digest.h"
#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/files/index.h"
#include "checkpoint/format/plan/json_numbers.h"

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

}  // namespace muster::shards
