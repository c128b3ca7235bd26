// SPDX-License-Identifier: BSD-3-Clause
#include "faces/compat/torch_job.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/memory/shared_allocator.h"
#include "core/rendezvous/rendezvous.h"
#include "faces/compat/torch_store.h"

namespace muster::compat {
namespace {

/// Stock torch has one default group per process, and does not say which one a new group was made
/// from.
struct Default {
  std::mutex mutex;
  std::weak_ptr<TorchJob> job;
  pid_t process = 0;  // a forked child has none
};
Default& default_job() {
  static Default holder;
  return holder;
}

}  // namespace

TorchJob::~TorchJob() {
  if (!closed_) job_->fabric->leave_unclosed();
}

std::shared_ptr<TorchJob> TorchJob::open(const c10::intrusive_ptr<c10d::Store>& store,
                                         const std::string& name, int rank, int size,
                                         Duration timeout) {
  store::RendezvousOptions options;
  options.rank = rank;
  options.world_size = size;
  const auto deadline = deadline_after(steady_clock(), timeout);
  group::share_memory_if_asked({});
  // Other users block on the given store; a clone has its own connection.
  auto own = meet_on(store->clone(), rank, size, timeout);
  if (!own.ok()) group::raise_from_store(own.status().with_context("init_process_group"));
  options.timeout = time_left(steady_clock(), deadline);
  auto found = store::rendezvous_over(std::move(own).value(), options);
  if (!found.ok()) group::raise_from_store(found.status().with_context("init_process_group"));
  found->any_host = found->host.empty();
  const auto config = BackendConfig::parse("native");
  std::shared_ptr<TorchJob> job(
      new TorchJob(group::open_job(std::move(found).value(), config, timeout, deadline)));
  job->world_ = group::make_default_group(job->job_, name, config, timeout, {.deadline = deadline});
  return job;
}

std::shared_ptr<TorchJob> TorchJob::of_default_group() {
  auto& holder = default_job();
  const std::lock_guard lock(holder.mutex);
  auto job = holder.process == ::getpid() ? holder.job.lock() : nullptr;
  return job && job->is_open() ? job : nullptr;
}

void TorchJob::make_default() {
  auto& holder = default_job();
  const std::lock_guard lock(holder.mutex);
  holder.job = weak_from_this();
  holder.process = ::getpid();
}

Group TorchJob::make_group(std::string name, std::vector<int> ranks, Duration timeout) {
  return group::make_group(job_, std::move(name), std::move(ranks), BackendConfig::parse("native"),
                           timeout);
}

TorchJob::Left TorchJob::shrink(const Group& old, const std::vector<int>& exclude,
                                Duration timeout) {
  const bool of_world = old == world_, of_default = of_default_group().get() == this;
  auto shrunk = group::shrink_group(job_, *old, exclude, of_world, timeout, nullptr);
  if (!of_world) return {shared_from_this(), std::move(shrunk.group)};
  std::shared_ptr<TorchJob> left(new TorchJob(std::move(shrunk.job)));
  left->world_ = shrunk.group;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    left->retired_ = std::exchange(retired_, {});
  }
  left->retired_.push_back(world_);
  if (of_default) left->make_default();
  // Ranks that were excluded and still wait in the old group get an error.
  core_of(world_).abort("the default group was shrunk");
  return {std::move(left), std::move(shrunk.group)};
}

bool TorchJob::is_open() const {
  const std::lock_guard lock(mutex_);
  return !closed_;
}

void TorchJob::retire(Group group) {
  const std::lock_guard lock(mutex_);
  if (!closed_) retired_.push_back(std::move(group));
}

void TorchJob::close(Duration limit) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
  }
  if (job_->peer_traces) job_->peer_traces->stop();
  const bool whole = world_->failure().ok();
  world_->set_timeout(std::min(world_->timeout(), limit));
  const auto status = whole ? core_of(world_).close() : world_->failure();
  if (whole && !status.ok()) log(LogLevel::warning, "destroy_process_group: " + status.message());
  if (job_->recorder && status.ok()) job_->recorder->remove();
  decltype(retired_) retired;  // groups end without the lock
  const std::lock_guard lock(mutex_);
  retired.swap(retired_);
}

}  // namespace muster::compat
