// SPDX-License-Identifier: BSD-3-Clause
/// The interfaces an agent offers to the layers above: request handlers, a call observer, and
/// participants in the shutdown.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "muster/clock.h"
#include "muster/rpc_function.h"
#include "muster/rpc_value.h"
#include "rpc/wire/message.h"
#include "rpc/wire/tensor_wire.h"

namespace muster::rpc {

/// A message this worker must handle.
struct Request {
  int from = -1;
  RpcMessage message;
  TimePoint deadline = TimePoint::max();  ///< the caller stops waiting then
  ResponderRef responder;                 ///< null if no reply is expected
  /// For unpacking the value: unpack<T>(message.value, *delivery).
  std::shared_ptr<ValueDelivery> delivery;
};

struct Handler {
  /// Exceptions become the reply.
  std::function<void(Request)> run;
  /// True if handling this request never blocks and takes a few microseconds at most; it then runs
  /// on the receiving thread, possibly a caller's. Empty: never.
  std::function<bool(const Request&)> is_short;
};

/// Sees the values of calls (MessageKind::call, and other kinds on request) as they are sent and
/// received. Autograd uses it to record send and receive functions and to pass the context id.
class Observer {
 public:
  /// Per-request state. `enter` and `leave` are called around its handler, on the thread that runs
  /// it.
  struct RequestScope {
    virtual ~RequestScope() = default;
    virtual void enter() {}
    virtual void leave() {}
  };
  virtual ~Observer() = default;
  /// Called on the caller's thread, once per call, before the value is sent. May write `note` and
  /// replace tensors. Returns true if the observer also wants the reply and the callee's observer
  /// must see the request.
  virtual bool request_leaves(int to, RpcMessage& message) = 0;
  /// Called on the callee, on the thread that will run the handler. May replace tensors. May return
  /// null.
  virtual std::shared_ptr<RequestScope> request_arrives(int from, RpcMessage& message) = 0;
  /// Called on the callee before a result (not an error) is sent, with what request_arrives
  /// returned.
  virtual void reply_leaves(int to, RpcMessage& message,
                            const std::shared_ptr<RequestScope>& scope) = 0;
  /// Called on the caller, on any thread, before the result is delivered.
  virtual void reply_arrives(int from, RpcMessage& message) = 0;
};

/// Takes part in the graceful shutdown. All calls come from the thread that shuts down.
class Drain {
 public:
  virtual ~Drain() = default;
  /// Every worker has called shutdown; users create nothing new from now on.
  virtual void begin() {}
  /// Polled while messages are driven. True once nothing of this worker waits for other workers or
  /// is held by them.
  virtual bool idle() = 0;
  /// "3 references to worker 'ps'", for the timeout error; empty if idle.
  virtual std::string waits_for() const { return {}; }
};

}  // namespace muster::rpc
