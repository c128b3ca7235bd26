// SPDX-License-Identifier: BSD-3-Clause
/// The updates of a watch between the thread that follows the service and the one that takes them.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>

#include "jobs/membership/membership.h"

namespace muster::membership {

/// Thread-safe.
class UpdateQueue {
 public:
  /// As `Watch::next` and `Watch::close`.
  Result<Update> next(Duration timeout);
  void close();
  bool closed() const;

  void push(Update update);
  /// Makes `next` return `failure` once all updates have been taken. The first failure stays.
  void fail(const Status& failure);

 private:
  mutable std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  std::deque<Update> updates_;
  std::int64_t taken_ = 0;  // revision of the last update that was taken
  Status failure_;
  bool closed_ = false;
};

}  // namespace muster::membership
