// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/modules/saver_identity.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/base/environment.h"
#include "core/group/epoch.h"
#include "core/security/secret.h"

namespace muster::checkpoint {
namespace {

constexpr std::size_t kLaunchBytes = 8;

struct LaunchesOfProcess {
  std::mutex mutex;                           ///< guards the following
  std::map<std::int64_t, std::string> begun;  ///< by loading, by the epoch in which it did
  shards::CommitRecord loaded;                ///< `before`: the launches whose saves it has loaded
};

LaunchesOfProcess& launches() {
  static LaunchesOfProcess& all = *new LaunchesOfProcess;
  return all;
}

std::string name_of_job() {
  const std::string name = env_text("TORCHELASTIC_RUN_ID").value_or("");
  return name == "none" ? std::string() : name;  // the launchers' name for an unnamed job
}

}  // namespace

shards::SaverIdentity saver_identity() {
  shards::SaverIdentity identity{.job = name_of_job(), .epoch = group::current_epoch()};
  LaunchesOfProcess& of = launches();
  const std::lock_guard lock(of.mutex);
  if (auto told = env_text("MUSTER_LAUNCH")) {
    identity.launch = *std::move(told);
  } else if (const auto after = of.begun.upper_bound(identity.epoch); after != of.begun.begin()) {
    identity.launch = std::prev(after)->second;
  }
  identity.before = of.loaded.before;
  std::erase(identity.before, identity.launch);
  return identity;
}

void note_loaded(const shards::CommitRecord& commit) {
  LaunchesOfProcess& of = launches();
  const std::lock_guard lock(of.mutex);
  of.loaded.job = name_of_job();
  of.loaded.go_on_from(commit);
  // It goes on also from what was saved by others that had gone on from it.
  std::string& launch = of.begun[group::current_epoch()];
  if (launch.empty() || std::ranges::count(commit.before, launch) > 0)
    launch = random_name(kLaunchBytes);
}

}  // namespace muster::checkpoint
