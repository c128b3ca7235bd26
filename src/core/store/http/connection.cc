#include "core/store/http/connection.h"

#include <algorithm>

#include "core/base/process/interruption.h"
#include "core/tunables/tunables.h"

namespace muster::store {

TimePoint earliest_look(TimePoint until) {
  return std::min(until, deadline_after(steady_clock(), Interruption::look_every()));
}

ConnectionPool::Borrowed::Borrowed(ConnectionPool& pool) : pool_(pool) {
  const std::lock_guard lock(pool_.mutex_);
  while (!pool_.idle_.empty() && !connection_) {
    connection_ = std::move(pool_.idle_.back());
    pool_.idle_.pop_back();
    if (!connection_->usable()) connection_.reset();
  }
  if (!connection_) connection_ = pool_.make_();
}

ConnectionPool::Borrowed::~Borrowed() {
  const std::lock_guard lock(pool_.mutex_);
  if (reusable_ && pool_.idle_.size() < static_cast<std::size_t>(tunables().kept_connections))
    pool_.idle_.push_back(std::move(connection_));
}

Status ConnectionPool::Borrowed::exchange(const HttpRequest& request, TimePoint limit) {
  connection_->start(request);
  const HttpTransfer& transfer = connection_->transfer();
  while (!transfer.ended && steady_clock().now() < limit) {
    if (Status interrupted = Interruption::of_thread(); !interrupted) return interrupted;
    connection_->drive(earliest_look(limit));
  }
  return {};
}

}  // namespace muster::store
