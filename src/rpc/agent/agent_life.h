/// An agent's state and the number of threads using it.
#pragma once

#include <atomic>
#include <cstdint>

namespace muster::rpc {

class AgentLife {
 public:
  enum class State : std::uint8_t { made, running, stopped };

  State state() const { return state_.load(); }
  bool stopped() const { return state_.load(std::memory_order_relaxed) == State::stopped; }
  /// Returns false if it was started or stopped before.
  bool start() {
    auto made = State::made;
    return state_.compare_exchange_strong(made, State::running);
  }
  void stop() { state_.store(State::stopped); }
  bool in_use() const { return users_.load() > 0; }

  /// Delays the agent's end during its lifetime. False if the agent has ended already.
  class AgentUse {
   public:
    explicit AgentUse(AgentLife& life) : life_(life) {
      life_.users_.fetch_add(1);
      running_ = life_.state_.load() != State::stopped;
    }
    ~AgentUse() { life_.users_.fetch_sub(1); }
    AgentUse(const AgentUse&) = delete;
    AgentUse& operator=(const AgentUse&) = delete;
    explicit operator bool() const { return running_; }

   private:
    AgentLife& life_;
    bool running_ = false;
  };

 private:
  std::atomic<State> state_{State::made};
  std::atomic<int> users_{0};  // threads in use; the shutdown waits for them
};

}  // namespace muster::rpc
