// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/region/pull_transfer.h"

#include <algorithm>

namespace muster::collective::region {

using shm::BufferLocation;
using shm::Counter;

void PullTransfer::fill_window(const Args& args, const TransferPlan& plan, std::size_t step) {
  const int rank = parts_.segment.rank();
  std::byte* const to = parts_.segment.window(
      rank,
      parts_.windows.acquire(parts_.segment.at_step(step + 1), Counter::drained, plan.reader));
  const auto part = [&](ConstBytes input) {
    const std::size_t at = std::min(step * plan.chunk, input.size());
    return input.subspan(at, std::min(plan.chunk, input.size() - at));
  };
  if (!plan.per_member) {
    stage(args, plan, to, part(input_for(args, plan, 0)));
    return;
  }
  const shm::ReaderSlice* const table = parts_.segment.table(rank);
  for (int reader = 0; reader < parts_.segment.size(); ++reader) {
    if (table[reader].location != BufferLocation::window) continue;
    stage(args, plan, to + static_cast<std::size_t>(reader) * parts_.segment.layout().column_bytes,
          part(input_for(args, plan, reader)));
  }
}

/// Whether the chunk of `step` of `source` can be read.
bool PullTransfer::available(const TransferPlan& plan, int source, std::size_t step) {
  if (step == 0) return parts_.lines.poll(source);
  const SourceMemory& from = parts_.sources[source];
  if (from.location != BufferLocation::window || step * plan.chunk >= from.bytes) return true;
  return shm::reached(parts_.segment.counter(source, Counter::filled),
                      parts_.segment.at_step(step + 1));
}

/// Lists the sources of the step that begins. Each member starts at its own neighbour, so that not
/// all of them read from one source at once.
void PullTransfer::order_sources(const TransferPlan& plan) {
  unread_.clear();
  const int sources = plan.last - plan.first, rank = parts_.segment.rank();
  for (int i = 0; i < sources; ++i) {
    const int source = plan.first + (i + rank + 1) % sources;
    if (source != rank) unread_.push_back(source);
  }
}

/// Reads from all sources in `step`, in the order in which their data becomes available.
Task<Status> PullTransfer::read_step(const Args& args, const TransferPlan& plan, std::size_t step) {
  const auto is_available = [&](int source) { return available(plan, source, step); };
  order_sources(plan);
  while (!unread_.empty()) {
    const int only = unread_.size() == 1 ? unread_.front() : -1;
    if (step == 0) {
      parts_.wait.for_lines(only);
    } else {
      parts_.wait.for_counter(Counter::filled, parts_.segment.at_step(step + 1), only);
    }
    if (!co_await parts_.wait.holds(
            [&] { return std::any_of(unread_.begin(), unread_.end(), is_available); }))
      co_return parts_.channel.failure();
    std::size_t kept = 0;
    for (std::size_t i = 0; i < unread_.size(); ++i) {
      const int source = unread_[i];
      if (!is_available(source)) {
        unread_[kept++] = source;
        continue;
      }
      const SourceMemory& from = parts_.sources[source];
      if (step == 0) {
        if (!co_await parts_.wait.holds([&] { return parts_.sources.mapped(plan, source); }))
          co_return parts_.channel.failure();
        Status resolved = parts_.sources.resolve(args, plan, source);
        if (!resolved) co_return co_await parts_.failure.fail_after_grace(std::move(resolved));
        const BufferLocation location = parts_.segment.line(source).location;
        must_publish_drained_ =
            must_publish_drained_ || location == BufferLocation::window || shm::in_place(location);
        if (plan.single_reader && from.location == BufferLocation::window &&
            from.bytes >= shm::direct_read_bytes(parts_.segment.layout().members))
          parts_.direct_reads.offer();
      }
      const std::size_t bytes = parts_.sources.piece(plan, source, step).bytes;
      if (plan.combines || bytes == 0) continue;
      Status copied = parts_.sources.copy_piece(args, plan, source, step);
      if (!copied) co_return co_await parts_.failure.fail_after_grace(std::move(copied));
      if (parts_.meter.due(bytes)) co_await YieldMeter::yield();
    }
    unread_.resize(kept);
  }
  co_return Status();
}

/// Reduces the chunk of `step` of all members into the output. Returns false if a peer has aborted,
/// since that peer may reuse the memory that it granted.
bool PullTransfer::combine(const Args& args, const TransferPlan& plan, std::size_t step) {
  const int rank = parts_.segment.rank();
  const MutableBytes out = args.outputs[0];
  const std::size_t at = step * plan.chunk;
  const std::size_t bytes = std::min(plan.chunk, out.size() - at);
  for (int member = 0; member < parts_.segment.size(); ++member) {
    parts_.sources.input(member) = member != rank || plan.scaled
                                       ? parts_.sources.chunk(plan, member, step)
                                       : input_for(args, plan, rank).data() + at;
  }
  const bool grants = parts_.sources.uses_grants();
  const std::size_t most = grants ? fixed::kCacheBlock : bytes;
  for (std::size_t done = 0; done < bytes; done += most) {
    if (grants && parts_.segment.peer_aborted()) return false;
    parts_.sources.reduce(args, plan.reclaims, out.data() + at + done,
                          std::min(most, bytes - done));
  }
  return true;
}

/// Waits until all readers have finished with this member's own memory. After a failure the readers
/// still get time to finish: they may have everything else that they need from other members.
Task<Status> PullTransfer::await_readers(const TransferPlan& plan) {
  const shm::Position end = parts_.segment.at_end();
  if (co_await parts_.wait.holds(parts_.wait.reached(Counter::drained, end, plan.reader)))
    co_return Status();
  if (plan.last > 0)
    static_cast<void>(co_await parts_.quiescence.quiesce(Counter::drained, plan.reader));
  co_return parts_.wait.reached(Counter::drained, end, plan.reader)() ? Status()
                                                                      : parts_.channel.failure();
}

Task<Status> PullTransfer::run(const Args& args, const transport::Fingerprint& call,
                               bool published) {
  const TransferPlan plan = parts_.planner.plan(args);
  shm::GroupSegment& segment = parts_.segment;
  // An inline call that was published has no windows.
  const std::size_t windows = published ? 0 : parts_.placement.place(args, plan);
  if (windows > 0) {
    co_await parts_.wait.holds(parts_.wait.is_drained(parts_.windows, segment.sequence() - 1));
    if (parts_.channel.failed()) co_return parts_.channel.failure();
    fill_window(args, plan, 0);
  }
  const bool has_in_place_readers = parts_.placement.has_in_place_readers(plan);
  if (!published) parts_.lines.publish(call);
  const bool reads_nothing = plan.last == 0;
  if (!reads_nothing) copy_own(args, plan, segment.rank());
  if (plan.scaled && !reads_nothing) {
    if (Status resolved = parts_.sources.resolve(args, plan, segment.rank()); !resolved)
      co_return resolved;
  }

  must_publish_drained_ = false;
  const std::size_t steps = std::max<std::size_t>({windows, plan.read_steps, 1});
  for (std::size_t step = 0; step < steps; ++step) {
    if (parts_.sources.reads_in_place() && parts_.channel.failed() && segment.peer_aborted())
      co_return parts_.channel.failure();  // the data read may be garbage
    if (step + 1 < windows) {
      if (!co_await parts_.wait.holds(parts_.wait.is_drained(parts_.windows, segment.sequence())))
        co_return parts_.channel.failure();
      fill_window(args, plan, step + 1);
      segment.advance(Counter::filled, segment.at_step(step + 2));
      parts_.peers.wake();
    }
    if (step > 0 && step >= plan.read_steps) continue;
    if (!reads_nothing) {
      if (Status copied = co_await read_step(args, plan, step); !copied) co_return copied;
    }
    if (plan.combines && !reads_nothing && step < plan.read_steps) {
      if (!combine(args, plan, step)) {
        parts_.failure.abort();  // the peer that aborted first waits until this one has stopped
        co_return co_await parts_.failure.cause();
      }
      if (parts_.meter.due(plan.chunk * segment.layout().members)) co_await YieldMeter::yield();
    }
    if (must_publish_drained_) {
      // After the last chunk that this member reads, its position is the end of the call, even if
      // peers still fill windows for other readers.
      segment.advance(Counter::drained,
                      step + 1 < plan.read_steps ? segment.at_step(step + 1) : segment.at_end());
      parts_.peers.wake();
    }
  }
  // The root of a scatter copies its own slice last, so that no peer waits for windows meanwhile.
  if (reads_nothing) copy_own(args, plan, segment.rank());
  if (has_in_place_readers) co_return co_await await_readers(plan);
  co_return Status();
}

}  // namespace muster::collective::region
