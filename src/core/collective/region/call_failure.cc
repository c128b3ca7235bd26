// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/region/call_failure.h"

#include <cstddef>
#include <exception>
#include <string>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/threads/host_barrier.h"
#include "core/collective/op.h"
#include "core/shm/arena/quarantine.h"
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

using shm::Counter;

/// Whether each peer (or `only`) has finished its part, has aborted, is dead, or has not begun. A
/// peer that begins later sees the abort first: `publish` and `abort` both have a full fence
/// between their store and their load, or `abort` sends a barrier to all processors.
bool Quiescence::quiesced(Counter done, int only) const {
  for (int member = 0; member < segment_.size(); ++member) {
    if (member == segment_.rank() || (only >= 0 && member != only)) continue;
    if (!segment_.has_begun(member)) continue;
    if (shm::reached(segment_.counter(member, done), segment_.at_end())) continue;
    if (segment_.progress(member).aborted.load(std::memory_order_acquire) != 0) continue;
    if (!channel_.fabric().death_of(job_rank(channel_, member)).ok()) continue;
    return false;
  }
  return true;
}

Task<> Quiescence::quiesce(Counter done, int only) {
  const Clock& clock = channel_.fabric().clock();
  const auto progress = [&] {
    shm::Position all = 0;
    for (int member = 0; member < segment_.size(); ++member) all += segment_.counter(member, done);
    return all;
  };
  shm::Position seen = progress();
  TimePoint limit = clock.now() + kQuiesceLimit;
  co_await until([&] {
    if (const shm::Position now = progress(); now != seen) {
      seen = now;
      limit = clock.now() + kQuiesceLimit;
    }
    return quiesced(done, only) || clock.now() >= limit;
  });
  co_return Status();
}

Task<> Quiescence::quiesce_exposed() {
  if (exposed_ == Exposed::output) co_return co_await quiesce(Counter::reduced);
  if (exposed_ == Exposed::inputs) co_return co_await quiesce(Counter::drained);
  co_return Status();
}

void Quiescence::quarantine(const Args& args) noexcept try {
  if (exposed_ == Exposed::output) quarantine(args.outputs[0], Counter::reduced, -1);
  if (exposed_ != Exposed::inputs) return;
  const shm::ReaderSlice* const table = segment_.table(segment_.rank());
  for (int reader = 0; reader < segment_.size(); ++reader) {
    if (table[reader].granted)
      quarantine(args.inputs[static_cast<std::size_t>(reader)], Counter::drained, reader);
  }
} catch (const std::exception& error) {
  log(LogLevel::error,
      std::string("cannot quarantine memory that a failed call has exposed to peers: ") +
          error.what());
}

// Unlike `quiesced`, this counts a peer as dead only if its process has ended: a silent peer may
// just be stopped.
void Quiescence::quarantine(ConstBytes memory, Counter done, int only) {
  shm::Arena* const arena = arena_();
  if (arena == nullptr) return;
  shm::OutstandingWriters writers(peers_.memory());
  for (int member = 0; member < segment_.size(); ++member) {
    if (member == segment_.rank() || (only >= 0 && member != only) || !segment_.has_begun(member))
      continue;
    writers.add(segment_.progress(member), done, segment_.at_end(), peers_.process_of(member));
  }
  if (!writers()) return;
  watches_writers_ = true;
  arena->quarantine(memory.data(), memory.size(), std::move(writers));
}

}  // namespace muster::collective::region
