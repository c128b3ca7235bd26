/// Marks a thread as belonging to an agent while it runs.
#pragma once

#include <functional>
#include <memory>

namespace muster::rpc {

class Agent;

/// Binds a thread to its worker if workers are threads of one process.
using BindThread = std::function<std::shared_ptr<void>()>;

class AgentThread {
 public:
  AgentThread(const Agent* agent, const BindThread& bind) : bound_(bind ? bind() : nullptr) {
    current = agent;
  }
  ~AgentThread() { current = before_; }
  AgentThread(const AgentThread&) = delete;
  AgentThread& operator=(const AgentThread&) = delete;

  static bool runs_here(const Agent* agent) { return current == agent; }

 private:
  static inline constinit thread_local const Agent* current = nullptr;
  const std::shared_ptr<void> bound_;
  const Agent* const before_ = current;
};

}  // namespace muster::rpc
