// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/history.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <set>
#include <system_error>
#include <tuple>

#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/files/index.h"
#include "checkpoint/format/staging.h"

namespace muster::shards {
namespace {

constexpr std::int64_t kNoStep = std::numeric_limits<std::int64_t>::min();

struct KnownCheckpoint {
  std::string path;
  std::optional<CommitRecord> record;  ///< none: damaged
  bool is_link = false;
  std::int64_t step = kNoStep;  ///< its own, or the highest before it

  /// Whether a save has put it there under this name.
  bool is_ours() const {
    if (!record || is_link) return false;
    return record->number == 0 || record->name == std::filesystem::path(path).filename().string();
  }
};

std::vector<std::string> folders_in(const std::string& folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (auto at = std::filesystem::directory_iterator(folder, error);
       !error && at != std::filesystem::directory_iterator(); at.increment(error))
    if (at->is_directory(error)) found.push_back(folder + "/" + at->path().filename().string());
  std::sort(found.begin(), found.end());
  return found;
}

bool is_of_a_save(const std::string& path) { return path.ends_with(".saving"); }

/// Oldest first.
std::vector<KnownCheckpoint> all_in(const std::string& folder) {
  std::vector<KnownCheckpoint> all;
  for (const std::string& path : folders_in(folder)) {
    if (is_of_a_save(path) || !exists(path + "/" + kIndexName)) continue;
    auto record = read_record(path);
    std::error_code error;
    all.push_back({.path = path,
                   .record = record.ok() ? std::optional(std::move(*record)) : std::nullopt,
                   .is_link = std::filesystem::is_symlink(path, error)});
  }
  const auto commit_order = [](const KnownCheckpoint& each) {
    return each.record ? std::tuple(false, each.record->number, each.record->committed_ns)
                       : std::tuple(true, std::int64_t{0}, std::int64_t{0});
  };
  std::stable_sort(all.begin(), all.end(),
                   [&](const auto& a, const auto& b) { return commit_order(a) < commit_order(b); });
  std::int64_t highest = kNoStep;
  for (KnownCheckpoint& each : all) {
    each.step = each.record && each.record->step ? *each.record->step : highest;
    highest = std::max(highest, each.step);
    if (!each.record) each.step = std::numeric_limits<std::int64_t>::max();
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.step < b.step; });
  return all;
}

}  // namespace

std::vector<std::string> checkpoints_in(const std::string& folder) {
  std::vector<std::string> names;
  for (KnownCheckpoint& each : all_in(without_slash(folder))) names.push_back(std::move(each.path));
  return names;
}

std::int64_t highest_number_in(const std::string& folder) {
  std::int64_t highest = 0;
  for (const KnownCheckpoint& each : all_in(folder))
    if (each.record) highest = std::max(highest, each.record->number);
  for (const UnfinishedSave& each : unfinished_saves_in(folder))
    highest = std::max(highest, each.number);
  return highest;
}

std::vector<std::string> unfinished_in(const std::string& folder) {
  auto found = folders_in(folder);
  std::erase_if(found, [](const std::string& each) { return !is_of_a_save(each); });
  return found;
}

Status check_only_own_files(const std::string& path, const Index& index) {
  std::error_code error;
  for (auto at = std::filesystem::directory_iterator(path, error);
       !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (name != kIndexName && name != kSaverName && !index.files.contains(name))
      return {Code::invalid_argument,
              "checkpoint: " + path + " has '" + name +
                  "', which is no part of the checkpoint and would be removed with it: move it or "
                  "save under another name"};
  }
  return {};
}

Status remove_checkpoint(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_symlink(path, error)) return refuse_link(path);
  const auto index = open_index(path);
  if (!index) return exists(path) ? index.status() : Status();
  if (check_only_own_files(path, *index).ok()) {
    const std::string removed = removed_name(path);
    const Status renamed = put_in_place(path, removed, /*replaces=*/false);
    if (!renamed) return exists(path) ? renamed : Status();  // another save has removed it
    return remove_files_of_ours(removed);
  }
  std::vector<std::string> names{kIndexName};
  for (const auto& [name, file] : index->files) names.push_back(name);
  for (const std::string& name : names)
    if (Status done = remove_file(path + "/" + name); !done) return done;
  return remove_empty_folder(path);
}

Status keep_last(const std::string& path, int count) {
  if (count <= 0) return {};
  const std::string folder = folder_of(path);
  auto all = all_in(folder);
  std::erase_if(all, [](const KnownCheckpoint& each) { return !each.is_ours(); });
  const std::string name = std::filesystem::path(path).filename().string();
  std::int64_t before = 0;  // the number of the commit before this one
  std::int64_t mine = std::numeric_limits<std::int64_t>::max();
  const auto is_mine = [&](const KnownCheckpoint& each) {
    return std::filesystem::path(each.path).filename().string() == name;
  };
  for (const KnownCheckpoint& each : all)
    if (is_mine(each)) mine = each.record->number;
  for (const KnownCheckpoint& each : all)
    if (each.record->number < mine) before = std::max(before, each.record->number);
  const auto kept = static_cast<std::size_t>(count);
  for (std::size_t i = 0; i + kept < all.size(); ++i)
    if (!is_mine(all[i]) && open_index(all[i].path).ok())
      if (Status done = remove_checkpoint(all[i].path); !done) return done;
  for (const UnfinishedSave& each : unfinished_saves_in(folder))
    if (each.number <= before && saver_has_ended(each.path))
      if (Status done = take_over(each.path, /*durable=*/false); !done) return done;
  return {};
}

}  // namespace muster::shards
