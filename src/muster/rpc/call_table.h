/// Calls of this worker that have no answer yet, and the workers that will give none. Thread-safe.
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

#include "muster/base/clock.h"
#include "muster/base/status.h"
#include "muster/rpc/value.h"

namespace muster::rpc {

/// The answer to a call.
struct Answer {
  std::exception_ptr
      error;  ///< what was thrown over there, or why there is no answer; null: all went well
  Parcel parcel;
  std::shared_ptr<Passage> passage;  ///< for unpacking
};
/// Called once, on the thread that found the answer, or saw the failure; must be short.
using Completion = std::function<void(Answer)>;

struct PendingCall {
  int to = -1;
  std::string name;
  TimePoint deadline = TimePoint::max();  ///< when `take_expired` gives it out
  Completion completion;
  std::shared_ptr<Passage> passage;  ///< what it keeps; null: nothing

  void fail(std::exception_ptr error) {
    Answer answer;
    answer.error = std::move(error);
    completion(std::move(answer));
  }
};

class CallTable {
 public:
  explicit CallTable(int workers) : lost_(static_cast<std::size_t>(workers)) {}

  std::uint64_t next_number() { return next_number_.fetch_add(1, std::memory_order_relaxed); }
  /// Fails, with `call` as it was, where its worker is lost.
  Status add(std::uint64_t number, PendingCall& call);
  /// Nothing where it was taken already, or goes to another worker than `to` (-1: any).
  std::optional<PendingCall> take(std::uint64_t number, int to);
  std::vector<std::pair<std::uint64_t, PendingCall>> take_expired(TimePoint now);
  std::vector<PendingCall> take_all();
  /// From here on `worker` cannot be called. Its calls; nothing where it was lost before.
  std::optional<std::vector<PendingCall>> lose(int worker, Status why);

  bool is_lost(int worker) const {
    return lost_[static_cast<std::size_t>(worker)].is.load(std::memory_order_acquire);
  }
  /// Success while it can be called.
  Status why_lost(int worker) const;
  /// Whether `take_expired` may ever find something; one relaxed load.
  bool may_expire() const { return next_expiry_.load(std::memory_order_relaxed) != kNever; }
  std::size_t size() const;

 private:
  struct Loss {
    std::atomic<bool> is{false};
    Status why;  // under mutex_, before `is`
  };
  using Calls = std::unordered_map<std::uint64_t, PendingCall>;
  static constexpr TimePoint::rep kNever = TimePoint::max().time_since_epoch().count();

  mutable std::mutex mutex_;
  Calls calls_;
  Calls::node_type spare_;  // of the call that ended last: the next one needs no memory
  std::vector<Loss> lost_;
  std::atomic<std::uint64_t> next_number_{1};
  std::atomic<TimePoint::rep> next_expiry_{kNever};
};

}  // namespace muster::rpc
