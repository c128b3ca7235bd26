// SPDX-License-Identifier: BSD-3-Clause
#include "muster/rref.h"

#include "rpc/agent/agent.h"
#include "rpc/autograd/autograd_context.h"
#include "rpc/rref/rref_context.h"

namespace muster::rpc::detail {

RRefHold keep_here(KeptValue value) {
  return RRefContext::of(*current_agent("RRef"))->keep_here(std::move(value));
}

RRefHold create_at(const To& to, std::string name, const PackArguments& pack,
                   const CallOptions& options) {
  const auto agent = current_agent("remote");
  return RRefContext::of(*agent)->create_at(agent->worker(to).id(), std::move(name), pack, options);
}

void save(ValueOutput& archive, const RRefHold& held) { held->context().save(archive, held); }

RRefHold load(ValueInput& archive) {
  if (archive.delivery().agent == nullptr)
    throw ValueError("a remote reference can travel in calls and their answers only");
  return RRefContext::of(*archive.delivery().agent)->load(archive);
}

bool is_owner(const RRefHandle& held) { return held.is_owner(); }
bool is_confirmed(const RRefHandle& held) { return held.context().confirmed(held.reference()); }
WorkerInfo owner(const RRefHandle& held) { return held.context().agent()->worker(held.owner()); }

void empty_rref(std::string_view what) {
  throw DistError(std::string(what) + ": this RRef refers to nothing");
}

void wrong_kept_type(const std::type_info& kept, const std::type_info& wanted) {
  throw DistError("this RRef refers to a value of type " + type_name(kept) + ", not " +
                  type_name(wanted));
}

const KeptValue& kept_value(const RRefHandle& held, std::string_view what, TimePoint deadline) {
  const auto agent = held.context().agent();
  if (!held.is_owner()) {
    throw DistError(std::string(what) + " is for the owner of an RRef, worker '" +
                    agent->worker(held.owner()).name() + "'; worker '" + agent->self().name() +
                    "' can have a copy: to_here()");
  }
  held.context().check(held);
  held.slot()->wait_until(deadline);
  if (const auto error = held.slot()->error()) std::rethrow_exception(error);
  return held.slot()->value();
}

Answer fetch(const RRefHandle& held, const CallOptions& options) {
  held.context().check(held);
  Agent::OutgoingCall call;
  call.to = held.owner();
  call.kind = kRRefFetch;
  call.name = "to_here";
  call.options = options;
  call.fill = [&](Value& value, ValueDelivery& delivery) {
    ValueOutput archive(value, delivery);
    encode_rref(archive, held.reference().rref);
  };
  return held.context().agent()->call_sync(std::move(call));
}

}  // namespace muster::rpc::detail
