#include "muster/rpc/rref.h"

#include "muster/rpc/autograd_context.h"

namespace muster::rpc::detail {

std::int32_t owner_of(const RRefHandle& held) { return held.reference().rref.owner; }

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
                    agent->worker(owner_of(held)).name() + "'; worker '" + agent->self().name() +
                    "' can have a copy: to_here()");
  }
  held.context().check(held);
  held.slot()->wait_until(deadline);
  if (const auto error = held.slot()->error()) std::rethrow_exception(error);
  return held.slot()->value();
}

Answer fetch(const RRefHandle& held, const CallOptions& options) {
  held.context().check(held);
  Agent::Call call;
  call.to = owner_of(held);
  call.kind = kRRefFetch;
  call.name = "to_here";
  call.options = options;
  call.fill = [&](Value& value, Passage& passage) {
    ValueOutput archive(value, passage);
    encode_rref(archive, held.reference().rref);
  };
  return held.context().agent()->call_sync(std::move(call));
}

}  // namespace muster::rpc::detail
