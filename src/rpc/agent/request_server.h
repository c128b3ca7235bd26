// SPDX-License-Identifier: BSD-3-Clause
/// Handles other workers' requests and replies to them. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "rpc/agent/agent_threads.h"
#include "rpc/agent/handler.h"
#include "rpc/agent/outbox.h"

namespace muster::rpc {

class Agent;

class RequestServer {
 public:
  /// The arguments must outlive this object. `agent` owns it; deliveries refer to the agent, and
  /// replies keep it alive.
  RequestServer(Agent& agent, AgentLife& life, Outbox& outbox, WorkerPool& pool)
      : agent_(agent), life_(life), outbox_(outbox), pool_(pool) {}

  /// Sets the handler of messages of this kind, replacing the previous one.
  void on(MessageKind kind, Handler handler);
  /// Sets the only observer; call before the first call.
  void observe(std::shared_ptr<Observer> observer) { observer_ = std::move(observer); }
  Observer* observer() const { return observer_.get(); }

  void take(int from, RpcMessage message);
  void cancel(int from, std::uint64_t call);
  /// Cancels all requests of `peer`.
  void cancel_all_of(int peer);

  /// Every request has been answered.
  bool idle() const { return unanswered_.load() == 0; }
  std::uint64_t handled() const { return handled_.load(); }
  std::uint64_t inline_runs() const { return inline_runs_.load(); }

 private:
  class Answering;

  void run(const Handler& handler, Request request, bool unwanted);

  Agent& agent_;
  AgentLife& life_;
  Outbox& outbox_;
  WorkerPool& pool_;
  // Read without the lock. A handler is stored with release once it is in `all_handlers_`, which
  // only grows: so a handler that is read stays valid.
  std::array<std::atomic<const Handler*>, 256> handlers_{};
  std::vector<std::unique_ptr<const Handler>> all_handlers_;  // under mutex_
  std::shared_ptr<Observer> observer_;

  std::mutex mutex_;  // guards `all_handlers_` and the following
  // Requests on the pool, by sender and call, for cancellation.
  std::map<std::pair<int, std::uint64_t>, std::weak_ptr<Answering>> serving_;
  std::atomic<std::int64_t> unanswered_{0};  // falls after the reply was launched
  std::atomic<std::uint64_t> handled_{0};    // requests handled here
  std::atomic<std::uint64_t> inline_runs_{0};
};

}  // namespace muster::rpc
