#include "core/collective/region/call_failure.h"

#include <utility>

#include "core/base/threads/host_barrier.h"
#include "core/collective/op.h"
#include "core/collective/region/quiescence.h"
#include "core/transport/fabric.h"

namespace muster::collective::region {

std::string rank_text(const transport::Channel& channel, int member) {
  return "rank " + std::to_string(job_rank(channel, member));
}

std::string CallFailure::call_text(const Args& args) const {
  return std::string(info(args.op).name) + " number " + std::to_string(segment_.sequence());
}

Status CallFailure::refuse(Status cause) {
  channel_.fail(cause);
  return channel_.failed() ? channel_.failure() : cause;
}

Task<Status> CallFailure::fail_after_grace(Status cause) {
  const Clock& clock = channel_.fabric().clock();
  const TimePoint limit = clock.now() + kQuiesceLimit;
  co_await until(
      [&] { return channel_.failed() || (clock.now() >= limit && !segment_.peer_aborted()); });
  co_return refuse(std::move(cause));
}

void CallFailure::abort() {
  if (!segment_.mark_aborted()) return;
  send_host_barrier();  // peers may publish without a fence
  peers_.wake();
}

Task<Status> CallFailure::cause() {
  co_await until([&] { return channel_.failed(); });
  co_return channel_.failure();
}

Status CallFailure::differing_sizes(const Args& args, int member, std::uint64_t theirs,
                                    std::uint64_t mine) {
  const int rank = segment_.rank();
  return refuse(Status(Code::mismatch,
                       call_text(args) + ": " + text(member) + " gives " + std::to_string(theirs) +
                           " bytes, " + text(rank) + " " + std::to_string(mine) +
                           "; all members must give the same number",
                       {job_rank(channel_, member), job_rank(channel_, rank)}));
}

Status CallFailure::unexpected_size(const Args& args, int member, std::uint64_t given,
                                    std::uint64_t expected) {
  const int rank = segment_.rank();
  return refuse(Status(Code::mismatch,
                       call_text(args) + ": " + text(member) + " gives " + text(rank) + " " +
                           std::to_string(given) + " bytes, which expects " +
                           std::to_string(expected) +
                           " from it; the sizes of inputs and outputs must agree between the two",
                       {job_rank(channel_, member), job_rank(channel_, rank)}));
}

Status CallFailure::cannot_map(int member, std::uint64_t bytes) const {
  return Status(Code::exhausted,
                text(segment_.rank()) + " cannot map the arena of " + text(member) +
                    ", which holds " + std::to_string(bytes) + " bytes of this call; check " +
                    "the limits on address space, mappings and descriptors (ulimit -v, "
                    "vm.max_map_count, ulimit -n)",
                {job_rank(channel_, segment_.rank())});
}

Status CallFailure::cannot_read(int member, std::uint64_t bytes) const {
  return Status(Code::peer_failed,
                text(segment_.rank()) + " cannot read " + std::to_string(bytes) +
                    " bytes of this call in the memory of " + text(member) +
                    ": that process has ended, has freed the memory during the call, or no longer "
                    "permits reads",
                {job_rank(channel_, member)});
}

Status CallFailure::failed_here(const Args& args, const Status& cause) {
  const int rank = segment_.rank();
  return refuse(Status(cause.code(),
                       text(rank) + " failed in " + call_text(args) + ": " + cause.message(),
                       {job_rank(channel_, rank)}));
}

}  // namespace muster::collective::region
