#include "muster/checkpoint/saver_identity.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>

#include "muster/base/env.h"
#include "muster/group/epoch.h"
#include "muster/shards/files/local_path.h"
#include "muster/shards/history.h"

namespace muster::checkpoint {
namespace {

/// The highest number of a commit known, by folder and by the epoch of this process in which it
/// was seen.
struct KnownCommits {
  std::mutex mutex;
  std::map<std::string, std::map<std::int64_t, std::int64_t>> of_folders;
};

KnownCommits& known_commits() {
  static KnownCommits& all = *new KnownCommits;
  return all;
}

/// The folder around a checkpoint, by one name.
std::string folder_around(const std::string& path) {
  const auto local = shards::local_path(path);
  if (!local) return {};
  std::error_code error;
  const auto whole = std::filesystem::weakly_canonical(*local, error);
  return (error ? std::filesystem::path(*local) : whole).parent_path().string();
}

}  // namespace

shards::SaverIdentity saver_identity(const std::string& path) {
  shards::SaverIdentity identity{.epoch = group::current_epoch()};
  identity.job = env_text("TORCHELASTIC_RUN_ID").value_or("");
  if (identity.job == "none") identity.job.clear();  // the launchers' name for an unnamed job
  KnownCommits& known = known_commits();
  const std::lock_guard lock(known.mutex);
  for (const auto& [epoch, number] : known.of_folders[folder_around(path)])
    if (epoch <= identity.epoch) identity.known_number = std::max(identity.known_number, number);
  return identity;
}

void note_loaded(const std::string& path) {
  const std::string folder = folder_around(path);
  const std::int64_t number = shards::highest_number_in(folder);
  KnownCommits& known = known_commits();
  const std::lock_guard lock(known.mutex);
  auto& of_epoch = known.of_folders[folder][group::current_epoch()];
  of_epoch = std::max(of_epoch, number);
}

}  // namespace muster::checkpoint
