// SPDX-License-Identifier: BSD-3-Clause
/// References to values on other workers: torch.distributed.rpc's RRef and remote.
///
///     // runs there, stays there
///     auto table = rpc::remote<at::Tensor>("ps", "make_table", 1000);
///     // passed on: it stays alive
///     at::Tensor rows = rpc::rpc_sync<at::Tensor>("trainer", "lookup", table, indices);
///     at::Tensor copy = table.to_here();
///
/// A value lives on its owner as long as any worker holds an RRef to it or one is in transit in a
/// call or a reply (rref_protocol.h). T is any type a registered function returns; only to_here
/// requires one that can be sent. RRefs are handles: copies are cheap and refer to the same value.
/// RRefs are thread-safe; the value is as thread-safe as its type. When a worker dies, references
/// to its values fail with an error that names it.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "muster/errors.h"
#include "muster/rpc_calls.h"
#include "muster/rpc_function.h"

namespace muster::rpc {

class RRefHandle;  // a held reference; released with the last shared_ptr to it
using RRefHold = std::shared_ptr<RRefHandle>;

template <class T>
class RRef;

namespace detail {

/// Makes `value` a value owned by the calling worker.
RRefHold keep_here(KeptValue value);
/// Runs the function `name` on `to`, which keeps the result. Does not block.
RRefHold create_at(const To& to, std::string name, const PackArguments& pack,
                   const CallOptions& options);
/// Write a reference to, or read one from, a call or a reply.
void save(ValueOutput& archive, const RRefHold& held);
RRefHold load(ValueInput& archive);
bool is_owner(const RRefHandle& held);
bool is_confirmed(const RRefHandle& held);
WorkerInfo owner(const RRefHandle& held);

/// On the owner: waits for the value behind `held` and returns it; throws what its creation threw.
/// `what` names the caller in errors.
const KeptValue& kept_value(const RRefHandle& held, std::string_view what,
                            TimePoint deadline = TimePoint::max());
[[noreturn]] void wrong_kept_type(const std::type_info& kept, const std::type_info& wanted);
[[noreturn]] void empty_rref(std::string_view what);
Answer fetch(const RRefHandle& held, const CallOptions& options);
void backward(const RRefHandle& held, std::int64_t context_id, bool retain_graph);

}  // namespace detail

template <class T>
class SyncProxy;
template <class T>
class AsyncProxy;
template <class T>
class RemoteProxy;

template <class T>
class RRef {
 public:
  RRef() = default;  ///< an empty reference
  /// Makes `value` a value owned by this worker.
  explicit RRef(T value) : held_(detail::keep_here(kept_of<T>(std::move(value)))) {}
  explicit RRef(RRefHold held) : held_(std::move(held)) {}

  bool valid() const { return held_ != nullptr; }
  bool is_owner() const { return detail::is_owner(held("is_owner")); }
  WorkerInfo owner() const { return detail::owner(held("owner")); }
  std::string owner_name() const { return owner().name(); }

  /// The value itself; on the owner only, elsewhere throws DistError. Waits until it is created;
  /// throws what its creation threw.
  T& local_value() const {
    const KeptValue& kept = detail::kept_value(held("local_value"), "local_value");
    if (*kept.type != typeid(T)) detail::wrong_kept_type(*kept.type, typeid(T));
    return *std::static_pointer_cast<T>(kept.object);
  }
  /// Returns a copy of the value (on the owner: the value). Blocks; throws what its creation threw.
  /// In a distributed autograd context, gradients flow back through it.
  T to_here(const CallOptions& options = {}) const {
    static_assert(kTravels<T>,
                  "values of this type cannot travel: call functions on them where they are "
                  "(RRef::rpc_sync)");
    if (is_owner()) return local_value();
    detail::Answer answer = detail::fetch(*held_, options);
    if (answer.error) std::rethrow_exception(answer.error);
    return detail::get_result<T>("to_here", answer.value, *answer.delivery);
  }
  /// Whether the owner has counted this reference; always true on the owner.
  bool confirmed_by_owner() const { return detail::is_confirmed(held("confirmed_by_owner")); }

  /// Runs backward from the value, a scalar tensor: in a distributed autograd context, or with -1
  /// locally on the owner only.
  void backward(std::int64_t dist_autograd_ctx_id = -1, bool retain_graph = false) const {
    static_assert(std::is_same_v<T, at::Tensor>, "backward needs a reference to a tensor");
    detail::backward(held("backward"), dist_autograd_ctx_id, retain_graph);
  }

  /// Calls functions on the owner: `ref.rpc_sync().call<R>("name", more...)` runs the function
  /// registered as "name" with this reference as its first argument, an `RRef<T>` whose
  /// local_value() is the value there. The three return an R, a Future<R> and an RRef<R>.
  SyncProxy<T> rpc_sync(const CallOptions& options = {}) const;
  AsyncProxy<T> rpc_async(const CallOptions& options = {}) const;
  RemoteProxy<T> remote(const CallOptions& options = {}) const;

  const RRefHold& hold() const { return held_; }

 private:
  const RRefHandle& held(std::string_view what) const {
    if (!held_) detail::empty_rref(what);
    return *held_;
  }

  RRefHold held_;
};

template <class T>
void CEREAL_SAVE_FUNCTION_NAME(ValueOutput& archive, const RRef<T>& rref) {
  if (!rref.valid()) detail::empty_rref("a call");
  detail::save(archive, rref.hold());
}
template <class T>
void CEREAL_LOAD_FUNCTION_NAME(ValueInput& archive, RRef<T>& rref) {
  rref = RRef<T>(detail::load(archive));
}

/// Runs the function registered as `name` on worker `to`, which keeps the result. Returns
/// immediately; errors are thrown by to_here.
template <class T, class... A>
RRef<T> remote(const To& to, std::string name, const CallOptions& options, const A&... arguments) {
  const auto pack = [&](Value& value, ValueDelivery& delivery) {
    detail::put_arguments(value, delivery, arguments...);
  };
  return RRef<T>(detail::create_at(to, std::move(name), pack, options));
}
template <class T, class... A>
RRef<T> remote(const To& to, std::string name, const A&... arguments) {
  return remote<T>(to, std::move(name), CallOptions{}, arguments...);
}

/// Calls functions on an RRef's owner with the RRef as their first argument.
template <class T>
class RRefProxy {
 public:
  RRefProxy(RRef<T> rref, CallOptions options) : rref_(std::move(rref)), options_(options) {}

 protected:
  To owner() const { return rref_.owner(); }
  RRef<T> rref_;
  CallOptions options_;
};
template <class T>
class SyncProxy : RRefProxy<T> {
 public:
  using RRefProxy<T>::RRefProxy;
  template <class R = void, class... A>
  R call(std::string name, const A&... arguments) const {
    return detail::call_and_wait<R>(this->owner(), std::move(name), this->options_, this->rref_,
                                    arguments...);
  }
};
template <class T>
class AsyncProxy : RRefProxy<T> {
 public:
  using RRefProxy<T>::RRefProxy;
  template <class R = void, class... A>
  Future<R> call(std::string name, const A&... arguments) const {
    return detail::call_later<R>(this->owner(), std::move(name), this->options_, this->rref_,
                                 arguments...);
  }
};
template <class T>
class RemoteProxy : RRefProxy<T> {
 public:
  using RRefProxy<T>::RRefProxy;
  template <class R, class... A>
  RRef<R> call(std::string name, const A&... arguments) const {
    return muster::rpc::remote<R>(this->owner(), std::move(name), this->options_, this->rref_,
                                  arguments...);
  }
};

template <class T>
SyncProxy<T> RRef<T>::rpc_sync(const CallOptions& options) const {
  return {*this, options};
}
template <class T>
AsyncProxy<T> RRef<T>::rpc_async(const CallOptions& options) const {
  return {*this, options};
}
template <class T>
RemoteProxy<T> RRef<T>::remote(const CallOptions& options) const {
  return {*this, options};
}

}  // namespace muster::rpc
