// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/log_tails.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "faces/cli/dash/stacks.h"
#include "faces/cli/printable.h"

namespace muster::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostLogs = 4096;                      // limit: a browser's patience
constexpr int kMostEntries = 65'536;                         // limit: time in a large folder
constexpr int kDeepestLog = 5;                               // job, node, attempt, rank, file
constexpr std::size_t kLongestTail = std::size_t{64} << 10;  // limit: a browser's patience

void add_logs_below(const std::string& folder, std::vector<LogOfJob>& logs) {
  std::error_code failed;
  fs::recursive_directory_iterator at(folder, fs::directory_options::skip_permission_denied,
                                      failed);
  for (int seen = 0; !failed && at != fs::recursive_directory_iterator() &&
                     logs.size() < kMostLogs && seen < kMostEntries;
       at.increment(failed), ++seen) {
    if (at.depth() >= kDeepestLog) at.disable_recursion_pending();
    std::error_code ignored;
    const fs::file_status status = at->symlink_status(ignored);
    if (status.type() != fs::file_type::regular || at->path().extension() != ".log") continue;
    const std::uintmax_t bytes = at->file_size(ignored);
    logs.push_back({at->path().lexically_relative(folder).string(), at->path().string(),
                    ignored ? 0 : static_cast<std::uint64_t>(bytes)});
  }
}

void add_streams_of(const trace::RankTrace& rank, std::vector<LogOfJob>& logs) {
  static constexpr const char* kStreams[] = {"", "stdout", "stderr"};
  for (int descriptor = 1; descriptor <= 2; ++descriptor) {
    std::error_code failed;
    const fs::path target = fs::read_symlink(
        "/proc/" + std::to_string(rank.pid) + "/fd/" + std::to_string(descriptor), failed);
    if (failed || !fs::is_regular_file(fs::symlink_status(target, failed))) continue;
    const bool listed = std::any_of(
        logs.begin(), logs.end(), [&](const LogOfJob& log) { return log.path == target.string(); });
    const std::uintmax_t bytes = fs::file_size(target, failed);
    if (listed || failed || logs.size() >= kMostLogs) continue;
    // Last: it looks at all descriptors of the process.
    if (is_process_here(rank))
      logs.push_back({"rank " + std::to_string(rank.rank) + " " + kStreams[descriptor],
                      target.string(), static_cast<std::uint64_t>(bytes)});
  }
}

}  // namespace

std::vector<LogOfJob> find_logs(const std::string& folder, const trace::JobTrace& job) {
  std::vector<LogOfJob> logs;
  if (!folder.empty()) add_logs_below(folder, logs);
  for (const auto& rank : job.ranks)
    if (rank.life != trace::Life::gone) add_streams_of(rank, logs);
  std::sort(logs.begin(), logs.end(),
            [](const LogOfJob& a, const LogOfJob& b) { return a.name < b.name; });
  return logs;
}

Result<FileTail> tail_of_log(const std::vector<LogOfJob>& logs, const std::string& name) {
  const auto found =
      std::find_if(logs.begin(), logs.end(), [&](const LogOfJob& log) { return log.name == name; });
  if (found == logs.end())
    return Status(Code::invalid_argument, "this job has no log file \"" + name + "\"");
  auto tail = tail_of_file(found->path, "the log file", kLongestTail);
  if (tail) tail->text = printable(tail->text);
  return tail;
}

}  // namespace muster::cli
