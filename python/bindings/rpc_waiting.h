// SPDX-License-Identifier: BSD-3-Clause
/// Waiting for other workers: without the GIL, driving this worker's messages, and ended by Ctrl-C.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "blocking.h"
#include "core/group/errors.h"
#include "rpc/agent/agent.h"

namespace muster::python {

inline DistBackendError interrupted_error() {
  return DistBackendError("interrupted (SIGINT)", Code::aborted);
}

/// Ctrl-C, seen by a thread that waits for the agent.
class CallInterruption {
 public:
  explicit CallInterruption(const std::shared_ptr<rpc::Agent>& agent) : agent_(agent) {}
  void raise() {
    raised_.store(true);
    if (const auto agent = agent_.lock()) agent->wake();
  }
  bool raised() const { return raised_.load(); }

 private:
  const std::weak_ptr<rpc::Agent> agent_;
  std::atomic<bool> raised_{false};
};

/// Calls `begin()`, then waits until `done()` returns true. The thread that makes it true must call
/// Agent::wake.
inline void wait_until(const std::shared_ptr<rpc::Agent>& agent, const std::function<bool()>& done,
                       const std::function<void()>& begin = {}) {
  const auto interruption = std::make_shared<CallInterruption>(agent);
  without_gil([interruption] { interruption->raise(); },
              [&] {
                if (begin) begin();
                agent->wait([&] { return done() || interruption->raised(); }, TimePoint::max());
                if (done()) return;
                if (interruption->raised()) throw interrupted_error();
                throw DistBackendError("RPC of worker '" + agent->self().name() + "' has ended",
                                       Code::aborted);
              });
}

/// Makes `call` and returns the answer, errors included. If interrupted, the call is abandoned, and
/// its function does not run if it has not begun.
inline rpc::Answer wait_for_answer(const std::shared_ptr<rpc::Agent>& agent,
                                   rpc::Agent::OutgoingCall call) {
  const auto interruption = std::make_shared<CallInterruption>(agent);
  return without_gil([interruption] { interruption->raise(); },
                     [&] {
                       auto answer = agent->call_sync(std::move(call),
                                                      [&] { return interruption->raised(); });
                       if (answer.error && interruption->raised()) throw interrupted_error();
                       return answer;
                     });
}

}  // namespace muster::python
