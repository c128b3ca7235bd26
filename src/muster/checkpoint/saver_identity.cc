#include "muster/checkpoint/saver_identity.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "muster/base/env.h"
#include "muster/base/secret.h"
#include "muster/group/epoch.h"

namespace muster::checkpoint {
namespace {

constexpr std::size_t kLaunchBytes = 8;

/// The launches that this process has begun by loading, by the epoch in which it did.
struct OwnLaunches {
  std::mutex mutex;
  std::map<std::int64_t, std::string> of_epochs;
};

OwnLaunches& own_launches() {
  static OwnLaunches& all = *new OwnLaunches;
  return all;
}

}  // namespace

shards::SaverIdentity saver_identity() {
  shards::SaverIdentity identity{.epoch = group::current_epoch()};
  identity.job = env_text("TORCHELASTIC_RUN_ID").value_or("");
  if (identity.job == "none") identity.job.clear();  // the launchers' name for an unnamed job
  if (auto told = env_text("MUSTER_LAUNCH")) {
    identity.launch = *std::move(told);
    return identity;
  }
  OwnLaunches& own = own_launches();
  const std::lock_guard lock(own.mutex);
  const auto after = own.of_epochs.upper_bound(identity.epoch);
  if (after != own.of_epochs.begin()) identity.launch = std::prev(after)->second;
  return identity;
}

void note_loaded() {
  OwnLaunches& own = own_launches();
  const std::lock_guard lock(own.mutex);
  std::string& launch = own.of_epochs[group::current_epoch()];
  if (launch.empty()) launch = random_name(kLaunchBytes);
}

}  // namespace muster::checkpoint
