/// What the layers above give to an agent: handlers of requests, an observer of calls, and those
/// who take part in its end.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "muster/base/clock.h"
#include "muster/rpc/kept_value.h"
#include "muster/rpc/message.h"
#include "muster/rpc/value.h"

namespace muster::rpc {

/// How a request is answered: once, from any thread, now or later. One that is dropped without an
/// answer fails the call.
class Responder {
 public:
  virtual ~Responder() = default;
  /// Packs and sends the result. `fill(value, passage)` runs on this thread. Where it throws, that
  /// is the answer.
  virtual void reply(const std::function<void(Value&, Passage&)>& fill) = 0;
  virtual void fail(std::exception_ptr error) = 0;
  /// Nobody waits for the answer any more.
  virtual bool cancelled() const = 0;
  /// Where the result is not to travel but to stay, as it is: then `keep` takes it in place of
  /// `reply`.
  virtual bool keeps() const { return false; }
  virtual void keep(KeptValue) {}
};
using ResponderRef = std::shared_ptr<Responder>;

/// A message that wants something of this worker.
struct Request {
  int from = -1;
  Kind kind = Kind::call;
  Parcel parcel;
  TimePoint deadline = TimePoint::max();  ///< after which nobody waits for the answer
  ResponderRef responder;                 ///< null where no answer is wanted
  /// For unpacking the parcel: unpack<T>(parcel.value, *passage). What it gets to wait for is
  /// waited for before the answer leaves.
  std::shared_ptr<Passage> passage;
};

struct Handler {
  /// Exceptions become the answer.
  std::function<void(Request)> run;
  /// Whether this one never waits and takes some microseconds at most: then it runs on the thread
  /// that found it, which may be a caller's. Empty: never.
  std::function<bool(const Request&)> is_short;
};

/// Sees what leaves and arrives with calls (Kind::call, and other kinds that ask for it): by it
/// autograd records its send and receive functions and tells the other side which context they
/// belong to.
class Observer {
 public:
  /// What belongs to one request while it is handled here. `enter` and `leave` are called around
  /// its handler on the thread that runs it.
  struct Scope {
    virtual ~Scope() = default;
    virtual void enter() {}
    virtual void leave() {}
  };
  virtual ~Observer() = default;
  /// The caller's thread, once per call, before the value is sent. May write `note` and replace
  /// tensors. True: the answer is of interest, and the other side's observer sees the request.
  virtual bool request_leaves(int to, Parcel& parcel) = 0;
  /// The callee, on the thread that is to run the handler. May replace tensors. May return null.
  virtual std::shared_ptr<Scope> request_arrives(int from, Parcel& parcel) = 0;
  /// The callee, before a result (not an error) is sent, with what request_arrives returned.
  virtual void reply_leaves(int to, Parcel& parcel, const std::shared_ptr<Scope>& scope) = 0;
  /// The caller, before the result is handed over. Any thread.
  virtual void reply_arrives(int from, Parcel& parcel) = 0;
};

/// Takes part in the graceful end. All calls come on the thread that shuts down.
class Drain {
 public:
  virtual ~Drain() = default;
  /// Every worker has come to its shutdown; from now on nothing new is made by users.
  virtual void begin() {}
  /// Asked again and again while messages are driven: nothing of this worker waits for others, or
  /// is held by others, any more.
  virtual bool idle() = 0;
  /// "3 references to worker 'ps'", for the error at the deadline; empty where it is idle.
  virtual std::string waits_for() const { return {}; }
};

}  // namespace muster::rpc
