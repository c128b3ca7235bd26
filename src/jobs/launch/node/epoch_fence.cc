// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/epoch_fence.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/threads/thread_start.h"

namespace muster::launch {
namespace {

constexpr Duration kFirstWordLimit = std::chrono::seconds(5);  // limit: of the own store
constexpr Duration kPause = std::chrono::seconds(1);  // limit: before an epoch is told again

}  // namespace

Result<std::unique_ptr<EpochFence>> EpochFence::start(
    std::unique_ptr<membership::Membership> store) {
  std::unique_ptr<EpochFence> fence(new EpochFence(std::move(store)));
  fence->event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fence->event_) return Status(Code::exhausted, "no event descriptor: " + errno_text(errno));
  auto thread = start_thread("the thread that tells the workers' store of epochs",
                             [raw = fence.get()] { raw->run(); });
  if (!thread) return thread.status();
  fence->thread_ = std::move(*thread);
  return fence;
}

EpochFence::~EpochFence() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  closing_->raise("the launcher ends");
  work_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void EpochFence::raise(const membership::Epoch& epoch) {
  const std::lock_guard lock(mutex_);
  wanted_ = epoch;
  work_.notify_all();
}

EpochFence::Raised EpochFence::take() {
  const std::lock_guard lock(mutex_);
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof count);
  return std::exchange(result_, {});
}

// A failure is told once, so that the epoch begins; the store is told of the epoch until it has
// taken it.
void EpochFence::run() {
  const Interruption::InterruptionBinding binding(closing_);
  std::unique_lock lock(mutex_);
  std::int64_t announced = 0;
  while (true) {
    work_.wait(lock, [this] { return stop_ || wanted_; });
    if (stop_) return;
    const membership::Epoch epoch = *std::exchange(wanted_, std::nullopt);
    lock.unlock();
    Status raised = commit(epoch);
    lock.lock();
    if (wanted_) continue;
    const bool failed = !raised;
    if (announced != epoch.number) {
      announced = epoch.number;
      result_ = {epoch.number, std::move(raised)};
      const std::uint64_t one = 1;
      [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
    }
    if (failed && !work_.wait_for(lock, kPause, [this] { return stop_ || wanted_; }))
      wanted_ = epoch;
  }
}

Status EpochFence::commit(const membership::Epoch& epoch) {
  auto revision = store_->commit(epoch, revision_);
  // After a commit whose answer was lost it is not known what lies there.
  if (!revision) {
    auto watch = store_->watch({});
    auto there =
        watch ? (*watch)->next(kFirstWordLimit) : Result<membership::Update>(watch.status());
    if (there && there->epoch && there->epoch->number >= epoch.number) {
      revision_ = there->epoch_revision;
      return {};
    }
    if (there) revision = store_->commit(epoch, there->epoch_revision);
  }
  if (revision) revision_ = *revision;
  return revision.status();
}

}  // namespace muster::launch
