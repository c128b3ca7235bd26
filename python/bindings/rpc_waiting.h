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

inline DistBackendError interrupted_error() { return DistBackendError("interrupted (SIGINT)", Code::aborted); }

/// `begin()`, then until `done()`; who makes that true calls Agent::wake.
inline void wait_until(const std::shared_ptr<rpc::Agent>& agent, const std::function<bool()>& done,
                       const std::function<void()>& begin = {}) {
  const auto interrupted = std::make_shared<std::atomic<bool>>(false);
  const auto interrupt = [interrupted, weak = std::weak_ptr<rpc::Agent>(agent)] {
    interrupted->store(true);
    if (const auto strong = weak.lock()) strong->wake();
  };
  without_gil(interrupt, [&] {
    if (begin) begin();
    agent->wait([&] { return done() || interrupted->load(); }, TimePoint::max());
    if (done()) return;
    if (interrupted->load()) throw interrupted_error();
    throw DistBackendError("RPC of worker '" + agent->self().name() + "' has ended", Code::aborted);
  });
}

/// The answer to `call`, errors in it. Interrupted, the call is given up; where its function has not begun, it will not.
inline rpc::Answer wait_for_answer(const std::shared_ptr<rpc::Agent>& agent, rpc::Agent::Call call) {
  struct Waiting {
    rpc::Answer answer;
    std::atomic<bool> done{false};
  };
  const auto waiting = std::make_shared<Waiting>();
  std::uint64_t number = 0;
  const auto begin = [&] {
    number = agent->call(std::move(call), [waiting](rpc::Answer answer) {
      waiting->answer = std::move(answer);
      waiting->done.store(true);
    });
  };
  try {
    wait_until(
        agent, [waiting] { return waiting->done.load(); }, begin);
  } catch (...) {
    const pybind11::gil_scoped_release released;
    if (number != 0) agent->cancel(number, std::make_exception_ptr(interrupted_error()));
    throw;
  }
  return std::move(waiting->answer);
}

}  // namespace muster::python
