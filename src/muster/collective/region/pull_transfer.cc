#include "muster/collective/region/pull_transfer.h"

#include <algorithm>

namespace muster::collective::region {

using shm::BufferLocation;
using shm::Counter;

void PullTransfer::fill_window(const Args& args, const TransferPlan& plan, std::size_t step) {
  const int rank = my_.segment.rank();
  std::byte* const to = my_.segment.window(
      rank, my_.windows.take(my_.segment.at_step(step + 1), Counter::drained, plan.reader));
  const auto part = [&](ConstBytes input) {
    const std::size_t at = std::min(step * plan.chunk, input.size());
    return input.subspan(at, std::min(plan.chunk, input.size() - at));
  };
  if (!plan.per_member) {
    stage(args, plan, to, part(input_for(args, plan, 0)));
    return;
  }
  const shm::Slice* const table = my_.segment.table(rank);
  for (int reader = 0; reader < my_.segment.size(); ++reader) {
    if (table[reader].location != BufferLocation::window) continue;
    stage(args, plan, to + static_cast<std::size_t>(reader) * my_.segment.layout().column_bytes,
          part(input_for(args, plan, reader)));
  }
}

/// Whether the chunk of `step` of `source` can be read.
bool PullTransfer::available(const TransferPlan& plan, int source, std::size_t step) {
  if (step == 0) return my_.lines.poll(source);
  const Source& from = my_.sources[source];
  if (from.location != BufferLocation::window || step * plan.chunk >= from.bytes) return true;
  return shm::reached(my_.segment.counter(source, Counter::filled), my_.segment.at_step(step + 1));
}

/// Lists the sources of the step that begins. Each member starts at its own neighbour, so that not
/// all of them read from one source at once.
void PullTransfer::order_sources(const TransferPlan& plan) {
  unread_.clear();
  const int sources = plan.last - plan.first, rank = my_.segment.rank();
  for (int turn = 0; turn < sources; ++turn) {
    const int source = plan.first + (turn + rank + 1) % sources;
    if (source != rank) unread_.push_back(source);
  }
}

/// Reads from all sources in `step`, in the order in which their data becomes available.
Task<Status> PullTransfer::read_step(const Args& args, const TransferPlan& plan, std::size_t step) {
  const auto there = [&](int source) { return available(plan, source, step); };
  order_sources(plan);
  while (!unread_.empty()) {
    const int only = unread_.size() == 1 ? unread_.front() : -1;
    if (step == 0) {
      my_.wait.for_lines(only);
    } else {
      my_.wait.for_counter(Counter::filled, my_.segment.at_step(step + 1), only);
    }
    if (!co_await my_.wait.holds(
            [&] { return std::any_of(unread_.begin(), unread_.end(), there); }))
      co_return my_.channel.failure();
    std::size_t later = 0;
    for (std::size_t turn = 0; turn < unread_.size(); ++turn) {
      const int source = unread_[turn];
      if (!there(source)) {
        unread_[later++] = source;
        continue;
      }
      const Source& from = my_.sources[source];
      if (step == 0) {
        if (!co_await my_.wait.holds([&] { return my_.sources.mapped(plan, source); }))
          co_return my_.channel.failure();
        Status resolved = my_.sources.resolve(args, plan, source);
        if (!resolved) co_return co_await my_.failure.fail_after_grace(std::move(resolved));
        const BufferLocation location = my_.segment.line(source).location;
        must_publish_drained_ =
            must_publish_drained_ || location == BufferLocation::window || shm::in_place(location);
        if (plan.single_reader && from.location == BufferLocation::window &&
            from.bytes >= shm::direct_read_bytes(my_.segment.layout().members))
          my_.direct_reads.offer();
      }
      const std::size_t bytes = my_.sources.piece(plan, source, step).bytes;
      if (plan.combines || bytes == 0) continue;
      Status took = my_.sources.take(args, plan, source, step);
      if (!took) co_return co_await my_.failure.fail_after_grace(std::move(took));
      if (my_.meter.due(bytes)) co_await YieldMeter::yield();
    }
    unread_.resize(later);
  }
  co_return Status();
}

/// Reduces the chunk of `step` of all members into the output. Returns false if a peer has aborted,
/// since that peer may reuse the memory that it granted.
bool PullTransfer::combine(const Args& args, const TransferPlan& plan, std::size_t step) {
  const int rank = my_.segment.rank();
  const MutableBytes out = args.outputs[0];
  const std::size_t at = step * plan.chunk;
  const std::size_t bytes = std::min(plan.chunk, out.size() - at);
  for (int member = 0; member < my_.segment.size(); ++member) {
    my_.sources.input(member) = member != rank || plan.scaled
                                    ? my_.sources.chunk(plan, member, step)
                                    : input_for(args, plan, rank).data() + at;
  }
  const bool grants = my_.sources.uses_grants();
  const std::size_t most = grants ? fixed::kCacheBlock : bytes;
  for (std::size_t done = 0; done < bytes; done += most) {
    if (grants && my_.segment.peer_aborted()) return false;
    my_.sources.reduce(args, plan.reclaims, out.data() + at + done, std::min(most, bytes - done));
  }
  return true;
}

/// Waits until all readers have finished with this member's own memory. After a failure the readers
/// still get time to finish: they may have everything else that they need from other members.
Task<Status> PullTransfer::await_readers(const TransferPlan& plan) {
  const shm::Position end = my_.segment.at_end();
  if (co_await my_.wait.holds(my_.wait.reached(Counter::drained, end, plan.reader)))
    co_return Status();
  if (plan.last > 0)
    static_cast<void>(co_await my_.quiescence.quiesce(Counter::drained, plan.reader));
  co_return my_.wait.reached(Counter::drained, end, plan.reader)() ? Status()
                                                                   : my_.channel.failure();
}

Task<Status> PullTransfer::run(const Args& args, const transport::Fingerprint& call,
                               bool published) {
  const TransferPlan plan = my_.planner.plan(args);
  shm::GroupSegment& segment = my_.segment;
  // An inline call that was published has no windows.
  const std::size_t windows = published ? 0 : my_.placement.place(args, plan);
  if (windows > 0) {
    co_await my_.wait.holds(my_.wait.is_drained(my_.windows, segment.sequence() - 1));
    if (my_.channel.failed()) co_return my_.channel.failure();
    fill_window(args, plan, 0);
  }
  const bool has_in_place_readers = my_.placement.has_in_place_readers(plan);
  if (!published) my_.lines.publish(call);
  const bool reads_nothing = plan.last == 0;
  if (!reads_nothing) copy_own(args, plan, segment.rank());
  if (plan.scaled && !reads_nothing) {
    if (Status resolved = my_.sources.resolve(args, plan, segment.rank()); !resolved)
      co_return resolved;
  }

  must_publish_drained_ = false;
  const std::size_t steps = std::max<std::size_t>({windows, plan.read_steps, 1});
  for (std::size_t step = 0; step < steps; ++step) {
    if (my_.sources.reads_in_place() && my_.channel.failed() && segment.peer_aborted())
      co_return my_.channel.failure();  // the data read may be garbage
    if (step + 1 < windows) {
      if (!co_await my_.wait.holds(my_.wait.is_drained(my_.windows, segment.sequence())))
        co_return my_.channel.failure();
      fill_window(args, plan, step + 1);
      segment.advance(Counter::filled, segment.at_step(step + 2));
      my_.peers.wake();
    }
    if (step > 0 && step >= plan.read_steps) continue;
    if (!reads_nothing) {
      if (Status took = co_await read_step(args, plan, step); !took) co_return took;
    }
    if (plan.combines && !reads_nothing && step < plan.read_steps) {
      if (!combine(args, plan, step)) {
        my_.failure.abort();  // the peer that aborted first waits until this one has stopped
        co_return co_await my_.failure.cause();
      }
      if (my_.meter.due(plan.chunk * segment.layout().members)) co_await YieldMeter::yield();
    }
    if (must_publish_drained_) {
      // After the last chunk that this member reads, its position is the end of the call, even if
      // peers still fill windows for other readers.
      segment.advance(Counter::drained,
                      step + 1 < plan.read_steps ? segment.at_step(step + 1) : segment.at_end());
      my_.peers.wake();
    }
  }
  // The root of a scatter copies its own slice last, so that no peer waits for windows meanwhile.
  if (reads_nothing) copy_own(args, plan, segment.rank());
  if (has_in_place_readers) co_return co_await await_readers(plan);
  co_return Status();
}

}  // namespace muster::collective::region
