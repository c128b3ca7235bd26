// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/world.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/job.h"

namespace muster {
namespace {

constinit thread_local const std::shared_ptr<WorldScope>* bound = nullptr;

const std::shared_ptr<WorldScope>& of_process() {
  static const std::shared_ptr<WorldScope> scope = std::make_shared<World>();
  return scope;
}

[[noreturn]] void not_initialized(std::string_view caller) {
  group::invalid(std::string(caller) +
                 " was called before init_process_group (or after destroy_process_group): there is "
                 "no default group in this " +
                 (bound != nullptr ? "rank's thread" : "process") +
                 "; call init_process_group first");
}

}  // namespace

const std::shared_ptr<WorldScope>& WorldScope::current() {
  return bound != nullptr ? *bound : of_process();
}

WorldScope::Binding::Binding(std::shared_ptr<WorldScope> scope)
    : scope_(std::move(scope)), before_(std::exchange(bound, scope_ ? &scope_ : nullptr)) {}
WorldScope::Binding::~Binding() { bound = before_; }

World::~World() { drop(); }

void World::drop() {
  std::shared_ptr<group::Job> job;
  std::vector<Group> groups;
  {
    const std::lock_guard lock(mutex_);
    job = std::exchange(job_, nullptr);
    groups = std::exchange(groups_, {});
    groups.insert(groups.begin(), std::exchange(world_, nullptr));
    counts_.clear();
  }
  if (job == nullptr) return;
  if (process_ != ::getpid()) {
    // In a forked child the connections belong to the parent, so their destructors must not run
    // here. The memory is freed with the process.
    new auto(std::move(job));
    new auto(std::move(groups));
    return;
  }
  job->fabric->leave_unclosed();
  while (!groups.empty()) groups.pop_back();
}

bool World::opened_here() const { return process_.load() == ::getpid(); }

void World::fail(const std::string& why, const std::vector<int>& earlier) {
  std::shared_ptr<group::Job> job;
  {
    const std::lock_guard lock(mutex_);
    job = job_;
  }
  if (job != nullptr) job->fabric->fail_rank(why, earlier);
  abort(why);
}

void World::end_after(const World& culprit, const std::string& why) {
  std::shared_ptr<group::Job> job, theirs;
  {
    const std::lock_guard lock(mutex_);
    job = job_;
  }
  {
    const std::lock_guard lock(culprit.mutex_);
    theirs = culprit.job_;
  }
  if (job != nullptr && theirs != nullptr && job->name == theirs->name) {
    const int rank = theirs->fabric->rank();
    job->fabric->declare_dead(
        rank,
        Status(Code::peer_failed, "rank " + std::to_string(rank) + " failed: " + why, {rank}));
  }
  abort(why);
}

std::vector<Group> World::groups() const {
  const std::lock_guard lock(mutex_);
  std::vector<Group> groups = groups_;
  if (world_) groups.push_back(world_);
  return groups;
}

void abort_groups(std::span<const Group> groups, const std::string& reason) {
  for (const Group& group : groups) core_of(group).end_calls(reason);
  for (const Group& group : groups) core_of(group).tell_of_abort(reason);
}

void World::abort(const std::string& reason) { abort_groups(groups(), reason); }

bool World::initialized() const {
  const std::lock_guard lock(mutex_);
  return world_ != nullptr;
}

Group World::world(std::string_view caller) const {
  const std::lock_guard lock(mutex_);
  if (world_ == nullptr) not_initialized(caller);
  return world_;
}

std::shared_ptr<group::Job> World::job(std::string_view caller) const {
  const std::lock_guard lock(mutex_);
  if (job_ == nullptr) not_initialized(caller);
  return job_;
}

void World::open(std::shared_ptr<group::Job> job, Group world) {
  const std::lock_guard lock(mutex_);
  if (world_ != nullptr)
    group::invalid("init_process_group was called twice on rank " + std::to_string(world_->rank()) +
                   ": there is a default group already; call destroy_process_group first");
  job_ = std::move(job);
  world_ = std::move(world);
  process_ = ::getpid();
}

void World::add(Group group) {
  const std::lock_guard lock(mutex_);
  groups_.push_back(std::move(group));
}

Group World::find(std::string_view name) const {
  const std::lock_guard lock(mutex_);
  if (world_ != nullptr && world_->name() == name) return world_;
  const auto at = std::find_if(groups_.begin(), groups_.end(), [&](const Group& each) {
    return each->is_member() && each->name() == name;
  });
  return at == groups_.end() ? nullptr : *at;
}

std::size_t World::group_count() const {
  const std::lock_guard lock(mutex_);
  return groups_.size() + (world_ != nullptr ? 1 : 0);
}

World::ClosedGroups World::remove(const Group& group, std::string_view caller) {
  const std::lock_guard lock(mutex_);
  if (world_ == nullptr) not_initialized(caller);
  ClosedGroups closing;
  if (group == nullptr || group == world_) {
    closing.groups.assign(groups_.rbegin(), groups_.rend());
    closing.groups.push_back(std::exchange(world_, nullptr));
    closing.job = std::exchange(job_, nullptr);
    groups_.clear();
    counts_.clear();
    return closing;
  }
  const auto at = std::find(groups_.begin(), groups_.end(), group);
  if (at == groups_.end())
    group::invalid(std::string(caller) + " on rank " + std::to_string(world_->rank()) + ": group " +
                   group->name() +
                   " was destroyed before, or belongs to another job; destroy each group once");
  closing.groups.push_back(*at);
  groups_.erase(at);
  return closing;
}

std::vector<Group> World::replace(std::shared_ptr<group::Job> job, Group world) {
  const std::lock_guard lock(mutex_);
  auto before = std::exchange(groups_, {});
  before.push_back(std::exchange(world_, std::move(world)));
  job_.swap(job);  // the old job is destroyed after the lock is released
  counts_.clear();
  return before;
}

std::string World::unique_name(const std::string& text) {
  const std::lock_guard lock(mutex_);
  const auto before = counts_[text]++;
  return before == 0 ? text : text + " (" + std::to_string(before + 1) + ")";
}

}  // namespace muster
