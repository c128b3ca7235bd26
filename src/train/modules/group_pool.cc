// SPDX-License-Identifier: BSD-3-Clause
#include "train/modules/group_pool.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/group/call/exchange.h"
#include "core/group/group_core.h"
#include "muster/init.h"

namespace muster::parallel {
namespace {

/// Identifies a pooled group: its name and the number of calls this member has made on it. Empty if
/// it has failed.
std::string key_of(const Group& group) {
  if (group == nullptr || !group->failure().ok()) return "";
  return group->name() + ' ' + std::to_string(core_of(group).collective_count());
}

/// Weak references: the groups end with the default group.
using Groups = std::vector<std::weak_ptr<ProcessGroup>>;

class GroupPool {
 public:
  static GroupPool& of_process() {
    static GroupPool pool;
    return pool;
  }
  void put(const Group& given, const Group& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(spares_, [](const auto& entry) { return entry.first.expired(); });
    spares_[given].push_back(group);
  }
  /// Usable groups, by key.
  std::map<std::string, Group> whole(const Group& given) {
    const std::lock_guard lock(mutex_);
    std::map<std::string, Group> whole;
    const auto found = spares_.find(given);
    if (found == spares_.end()) return whole;
    for (const auto& spare : found->second) {
      const Group group = spare.lock();
      if (const auto key = key_of(group); !key.empty()) whole[key] = group;
    }
    return whole;
  }
  void remove(const Group& given, const Group& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(spares_[given], [&](const auto& spare) { return spare.lock() == group; });
  }

 private:
  std::mutex mutex_;
  std::map<std::weak_ptr<ProcessGroup>, Groups, std::owner_less<>> spares_;
};

std::set<std::string> lines_of(const std::string& text) {
  std::set<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.insert(line);
  return lines;
}

}  // namespace

Group acquire_group(const Group& given) {
  auto& pool = GroupPool::of_process();
  auto mine = pool.whole(given);
  std::string text;
  for (const auto& [key, group] : mine) text += key + '\n';
  std::set<std::string> common = lines_of(text);
  for (const std::string& theirs : group::exchange_text(given, text)) {
    const auto others = lines_of(theirs);
    std::erase_if(common, [&](const std::string& key) { return others.count(key) == 0; });
  }
  if (common.empty())
    return new_group({.ranks = given->ranks(),
                      .timeout = given->timeout(),
                      .backend = given->backend(),
                      .use_local_synchronization = true});
  const Group group = mine[*common.begin()];
  pool.remove(given, group);
  group->set_timeout(given->timeout());
  return group;
}

void release_group(const Group& given, const Group& group) {
  if (group->failure().ok()) GroupPool::of_process().put(given, group);
}

}  // namespace muster::parallel
