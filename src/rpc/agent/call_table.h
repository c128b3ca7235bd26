// SPDX-License-Identifier: BSD-3-Clause
/// This worker's calls without a reply, and the lost workers. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "muster/clock.h"
#include "muster/rpc_calls.h"
#include "muster/rpc_value.h"
#include "muster/status.h"
#include "rpc/wire/tensor_wire.h"

namespace muster::rpc {

using detail::Answer;
using detail::Completion;

struct PendingCall {
  int to = -1;
  std::string name;
  TimePoint deadline = TimePoint::max();  ///< `take_expired` returns it then
  Completion completion;
  std::shared_ptr<ValueDelivery>
      delivery;  ///< of the arguments; null: nothing depends on their arrival

  void fail(std::exception_ptr error) {
    Answer answer;
    answer.error = std::move(error);
    completion(std::move(answer));
  }
};

/// The thread that takes a call out of the table completes it, without the lock: so each call is
/// completed once. A call to a lost worker is never added.
class CallTable {
 public:
  explicit CallTable(int workers) : lost_(static_cast<std::size_t>(workers)) {}

  std::uint64_t next_number() { return next_number_.fetch_add(1, std::memory_order_relaxed); }
  /// Fails and leaves `call` unchanged if its worker is lost.
  Status add(std::uint64_t number, PendingCall& call);
  /// Empty if it was taken already or goes to a worker other than `to` (-1: any).
  std::optional<PendingCall> take(std::uint64_t number, int to);
  std::vector<std::pair<std::uint64_t, PendingCall>> take_expired(TimePoint now);
  std::vector<PendingCall> take_all();
  /// Marks `worker` as lost. Returns its pending calls; empty if it was lost before.
  std::optional<std::vector<PendingCall>> lose(int worker, Status why);

  bool is_lost(int worker) const {
    return lost_[static_cast<std::size_t>(worker)].is.load(std::memory_order_acquire);
  }
  /// Ok while it can be called.
  Status why_lost(int worker) const;
  /// Whether `take_expired` may find something; one relaxed load.
  bool may_expire() const { return next_expiry_.load(std::memory_order_relaxed) != kNever; }
  std::size_t size() const;

 private:
  struct Loss {
    std::atomic<bool> is{false};
    Status why;  // written under mutex_ before `is`
  };
  using Calls = std::unordered_map<std::uint64_t, PendingCall>;
  static constexpr TimePoint::rep kNever = TimePoint::max().time_since_epoch().count();

  mutable std::mutex mutex_;  // guards the calls and each `Loss::why`
  Calls calls_;
  Calls::node_type spare_;  // node of the last finished call, reused without allocation
  std::vector<Loss> lost_;
  std::atomic<std::uint64_t> next_number_{1};
  // No later than the earliest deadline; written under mutex_. An old value costs a poll.
  std::atomic<TimePoint::rep> next_expiry_{kNever};
};

}  // namespace muster::rpc
