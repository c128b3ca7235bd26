// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/agent/call_table.h"

#include <algorithm>

namespace muster::rpc {

Status CallTable::add(std::uint64_t number, PendingCall& call) {
  const std::lock_guard lock(mutex_);
  const Loss& loss = lost_[static_cast<std::size_t>(call.to)];
  if (loss.is.load(std::memory_order_relaxed)) return loss.why;
  const auto expiry = call.deadline.time_since_epoch().count();
  if (expiry < next_expiry_.load()) next_expiry_.store(expiry);
  if (spare_.empty()) {
    calls_.emplace(number, std::move(call));
  } else {
    spare_.key() = number;
    spare_.mapped() = std::move(call);
    calls_.insert(std::move(spare_));
  }
  return {};
}

std::optional<PendingCall> CallTable::take(std::uint64_t number, int to) {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(number);
  if (found == calls_.end() || (to >= 0 && found->second.to != to)) return {};
  std::optional<PendingCall> call(std::move(found->second));
  spare_ = calls_.extract(found);
  return call;
}

std::vector<std::pair<std::uint64_t, PendingCall>> CallTable::take_expired(TimePoint now) {
  std::vector<std::pair<std::uint64_t, PendingCall>> expired;
  if (now.time_since_epoch().count() < next_expiry_.load(std::memory_order_relaxed)) return expired;
  const std::lock_guard lock(mutex_);
  auto next = TimePoint::max();
  for (auto at = calls_.begin(); at != calls_.end();) {
    if (at->second.deadline > now) {
      next = std::min(next, at->second.deadline);
      ++at;
      continue;
    }
    expired.emplace_back(at->first, std::move(at->second));
    at = calls_.erase(at);
  }
  next_expiry_.store(next.time_since_epoch().count());
  return expired;
}

std::vector<PendingCall> CallTable::take_all() {
  const std::lock_guard lock(mutex_);
  std::vector<PendingCall> all;
  for (auto& [number, call] : calls_) all.push_back(std::move(call));
  calls_.clear();
  return all;
}

std::optional<std::vector<PendingCall>> CallTable::lose(int worker, Status why) {
  const std::lock_guard lock(mutex_);
  Loss& loss = lost_[static_cast<std::size_t>(worker)];
  if (loss.is.load()) return {};
  loss.why = std::move(why);
  loss.is.store(true, std::memory_order_release);
  std::vector<PendingCall> calls;
  for (auto at = calls_.begin(); at != calls_.end();) {
    if (at->second.to != worker) {
      ++at;
      continue;
    }
    calls.push_back(std::move(at->second));
    at = calls_.erase(at);
  }
  return calls;
}

Status CallTable::why_lost(int worker) const {
  const std::lock_guard lock(mutex_);
  const Loss& loss = lost_[static_cast<std::size_t>(worker)];
  return loss.is.load() ? loss.why : Status();
}

std::size_t CallTable::size() const {
  const std::lock_guard lock(mutex_);
  return calls_.size();
}

}  // namespace muster::rpc
