/// Values that are still to come: what rpc_async returns, what a function over there returns to
/// free its thread (SPEC "async_execution").
///
/// A `Future<T>` is a handle to shared state; copies see the same value. Whoever waits for one that
/// belongs to an agent drives that agent's messages meanwhile, on its own thread. Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "muster/base/clock.h"

namespace muster::rpc {

class Agent;

/// The part of a future's state that does not depend on its type. Always held by shared pointers.
class FutureCore : public std::enable_shared_from_this<FutureCore> {
 public:
  explicit FutureCore(std::weak_ptr<Agent> agent) : agent_(std::move(agent)) {}
  virtual ~FutureCore() = default;
  FutureCore(const FutureCore&) = delete;
  FutureCore& operator=(const FutureCore&) = delete;

  bool done() const { return done_.load(std::memory_order_acquire); }
  /// False at the deadline.
  bool wait_until(TimePoint deadline) const;
  std::exception_ptr error() const { return error_; }
  const std::weak_ptr<Agent>& agent() const { return agent_; }
  /// The first completion counts; false for later ones.
  bool fail(std::exception_ptr error);

 protected:
  /// Takes the right to complete; then write the value and call `publish`.
  bool claim() { return !claimed_.exchange(true, std::memory_order_acq_rel); }
  void publish();
  /// As FutureState::then.
  void call_when_done(std::function<void()> callback);

 private:
  std::weak_ptr<Agent> agent_;
  std::atomic<bool> claimed_{false};
  std::atomic<bool> done_{false};
  std::exception_ptr error_;
  mutable std::mutex mutex_;
  mutable std::condition_variable completed_;
  std::vector<std::function<void()>> callbacks_;
};

template <class T>
class FutureState final : public FutureCore {
 public:
  using Stored = std::conditional_t<std::is_void_v<T>, std::monostate, T>;
  using FutureCore::FutureCore;
  bool set(Stored value) {
    if (!claim()) return false;
    value_.emplace(std::move(value));
    publish();
    return true;
  }
  const Stored& value() const { return *value_; }
  /// Calls `callback(state)`: at once where this is done; else once it is, on a thread for
  /// callbacks (where there is no agent: on the thread that completes it). The state that it is
  /// called with is this one: a callback that holds it itself would keep a state alive whose value
  /// never comes.
  template <class F>
  void then(F callback) {
    call_when_done([this, callback = std::move(callback)]() mutable {
      callback(std::static_pointer_cast<FutureState>(this->shared_from_this()));
    });
  }

 private:
  std::optional<Stored> value_;
};

template <class T>
class Future {
 public:
  using State = FutureState<T>;
  Future() = default;
  explicit Future(std::shared_ptr<State> state) : state_(std::move(state)) {}

  bool valid() const { return state_ != nullptr; }
  bool done() const { return state_->done(); }
  /// Blocks; throws what went wrong, here or over there. May be called again.
  T wait() const {
    state_->wait_until(TimePoint::max());
    if (auto error = state_->error()) std::rethrow_exception(error);
    if constexpr (!std::is_void_v<T>) return state_->value();
  }
  /// False at the deadline.
  bool wait_until(TimePoint deadline) const { return state_->wait_until(deadline); }
  /// Null while it is not done, or went well.
  std::exception_ptr error() const { return state_->done() ? state_->error() : nullptr; }

  /// What `callback(future)` returns, once this is done (also where it failed: `wait` inside
  /// throws); its exceptions are the new future's.
  template <class F>
  auto then(F callback) const -> Future<std::invoke_result_t<F, Future<T>>> {
    using U = std::invoke_result_t<F, Future<T>>;
    auto next = std::make_shared<FutureState<U>>(state_->agent());
    state_->then(
        [next, callback = std::move(callback)](const std::shared_ptr<State>& state) mutable {
          const Future<T> self(state);
          try {
            if constexpr (std::is_void_v<U>) {
              callback(self);
              next->set({});
            } else {
              next->set(callback(self));
            }
          } catch (...) {
            next->fail(std::current_exception());
          }
        });
    return Future<U>(std::move(next));
  }
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

/// The other end. A promise that goes without a value fails its future. The second value throws
/// std::logic_error.
template <class T>
class Promise {
 public:
  Promise();
  explicit Promise(std::weak_ptr<Agent> agent)
      : holder_(std::make_shared<Holder>(std::make_shared<FutureState<T>>(std::move(agent)))) {}

  Future<T> future() const { return Future<T>(holder_->state); }
  template <class... V>
  void set_value(V&&... value) const {
    if (!holder_->state->set(typename FutureState<T>::Stored{std::forward<V>(value)...})) twice();
  }
  void set_exception(std::exception_ptr error) const {
    if (!holder_->state->fail(std::move(error))) twice();
  }

 private:
  [[noreturn]] static void twice() { throw std::logic_error("a promise was given a second value"); }
  struct Holder {
    explicit Holder(std::shared_ptr<FutureState<T>> s) : state(std::move(s)) {}
    ~Holder() {
      if (!state->done())
        state->fail(
            std::make_exception_ptr(std::runtime_error("the promise was dropped without a value")));
    }
    std::shared_ptr<FutureState<T>> state;
  };
  std::shared_ptr<Holder> holder_;
};

/// The agent that the calling thread's promises belong to: null before init_rpc.
std::weak_ptr<Agent> agent_of_thread();

template <class T>
Promise<T>::Promise() : Promise(agent_of_thread()) {}

/// A future that is done.
template <class T>
Future<std::decay_t<T>> made_ready(T&& value) {
  auto state = std::make_shared<FutureState<std::decay_t<T>>>(std::weak_ptr<Agent>());
  state->set(std::forward<T>(value));
  return Future<std::decay_t<T>>(std::move(state));
}

/// The values of all, in order, once all are there; throws the first one's error by position after
/// all are done.
template <class T>
std::vector<T> wait_all(const std::vector<Future<T>>& futures) {
  for (const auto& future : futures) future.wait_until(TimePoint::max());
  std::vector<T> values;
  values.reserve(futures.size());
  for (const auto& future : futures) values.push_back(future.wait());
  return values;
}

}  // namespace muster::rpc
