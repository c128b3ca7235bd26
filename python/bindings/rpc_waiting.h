/// Waiting for other workers: without the GIL, driving this worker's messages, and ended by Ctrl-C.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "blocking.h"
#include "muster/group/errors.h"
#include "muster/rpc/agent.h"

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

/// `begin()`, then until `done()`; who makes that true calls Agent::wake.
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

/// The answer to `call`, errors in it. Interrupted, the call is given up; where its function has
/// not begun, it will not.
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
