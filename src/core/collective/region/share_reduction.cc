// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/region/share_reduction.h"

#include <cstring>
#include <optional>
#include <utility>

#include "core/collective/kernels/kernels.h"
#include "core/shm/cache_lines.h"

namespace muster::collective::region {
namespace {

using shm::BufferLocation;
using shm::Counter;
using shm::Line;

/// Bytes per round if the root reduces for others. The others fill one window while the root
/// reduces another, and all of those fit into the caches.
std::size_t round_for_root(std::size_t members, std::size_t bytes) {
  if (members > 2) return fixed::kWindowBytes / 2;
  return std::clamp(shm::align_up(bytes / 16, shm::kCacheLine), 2 * fixed::kSlotBytes,
                    fixed::kReduceChunk);
}

}  // namespace

ReductionPlan ShareReduction::plan(const Args& args) {
  const std::size_t members = parts_.segment.layout().members;
  ReductionPlan plan{args, args.inputs[0]};
  plan.element = size_of(args.dtype);
  plan.grain = shm::kCacheLine / plan.element;
  plan.count = plan.input.size() / plan.element;
  plan.root = args.op == Op::reduce ? args.root : -1;
  plan.root_reduces =
      plan.root >= 0 && (members == 2 || (parts_.topology.oversubscribed() &&
                                          plan.input.size() <= fixed::kReclaimBytes));
  plan.cut(plan.root_reduces ? round_for_root(members, plan.input.size())
                             : parts_.segment.layout().window_bytes);
  plan.scaled = args.reduce == Reduce::premul_sum;
  plan.reclaims = shm::writes_back_lines();
  plan.reclaims_results =
      plan.reclaims && (plan.root >= 0 || members == 2 ||
                        parts_.planner.concurrent_reclaim(args.op, members * plan.input.size()));
  return plan;
}

/// Records in this member's line where its input and output are.
void ShareReduction::place(ReductionPlan& plan) {
  const int rank = parts_.segment.rank();
  const auto input =
      plan.scaled || parts_.planner.copies_from_arena(plan.args.op, plan.input.size())
          ? std::nullopt
          : parts_.placement.arena_offset(plan.input);
  const auto output = plan.needs_result(rank)
                          ? parts_.placement.writable_offset(plan.args.outputs[0])
                          : std::nullopt;
  plan.staged = !input;
  plan.copies = plan.needs_result(rank) && !output;
  if (output) parts_.quiescence.expose_output();
  Line& mine = parts_.segment.my_line();
  mine.bytes = plan.input.size();
  mine.location = input ? BufferLocation::arena : BufferLocation::window;
  mine.output_location = output ? BufferLocation::arena : BufferLocation::window;
  mine.input = input.value_or(0);
  mine.output = output.value_or(0);
  mine.first_window = parts_.windows.next();
  mine.first_result = parts_.results.next();
  parts_.sources[rank] = {mine.location, nullptr, mine.bytes, 0, mine.first_window};
}

/// Whether all peers' memory that this member reads or writes is mapped. All lines must have been
/// seen.
bool ShareReduction::all_mapped(const ReductionPlan& plan) {
  bool all = true;
  for (int member = 0; member < parts_.segment.size(); ++member) {
    if (member == parts_.segment.rank()) continue;
    const Line& theirs = parts_.segment.line(member);
    const bool arena =
        theirs.location == BufferLocation::arena ||
        (plan.needs_result(member) && theirs.output_location == BufferLocation::arena);
    all = (!arena || parts_.peers.arena_ready(member)) && all;
  }
  return all;
}

/// Looks up the peers' inputs and outputs from their lines, which have all been seen.
Status ShareReduction::resolve(ReductionPlan& plan) {
  for (int member = 0; member < parts_.segment.size(); ++member) {
    std::byte*& output = outputs_[static_cast<std::size_t>(member)];
    output = nullptr;
    if (member == parts_.segment.rank()) continue;
    if (Status resolved = parts_.sources.resolve_share(plan.args, member, plan.input.size());
        !resolved)
      return resolved;
    if (!plan.needs_result(member)) continue;
    const Line& theirs = parts_.segment.line(member);
    if (theirs.output_location == BufferLocation::arena) {
      output = parts_.peers.arena_at(member, theirs.output, plan.input.size());
      if (output == nullptr) return parts_.failure.cannot_map(member, plan.input.size());
    } else {
      plan.publishes_results = true;
    }
  }
  return {};
}

void ShareReduction::fill_input(const ReductionPlan& plan, std::size_t round) {
  const int rank = parts_.segment.rank();
  std::byte* const to = parts_.segment.window(
      rank, parts_.windows.acquire(parts_.segment.at_step(round + 1), Counter::reduced, -1));
  const std::byte* const from = plan.input.data() + plan.start(round) * plan.element;
  const std::size_t length = plan.length(round);
  if (plan.scaled) {
    scale(to, from, length, plan.args.dtype, plan.args.factor);
  } else if (plan.root_reduces && rank != plan.root) {
    std::memcpy(to, from, length * plan.element);
  } else {
    const shm::Share mine = plan.share(round, parts_.segment.layout().members, rank);
    std::memcpy(to, from, mine.begin * plan.element);
    std::memcpy(to + mine.end * plan.element, from + mine.end * plan.element,
                (length - mine.end) * plan.element);
  }
}

void ShareReduction::fill_and_publish(const ReductionPlan& plan, std::size_t round) {
  fill_input(plan, round);
  parts_.segment.advance(Counter::filled, parts_.segment.at_step(round + 1));
  parts_.peers.wake();
}

/// The member that reduces `member`'s share. All lines must have been seen.
int ShareReduction::reducer(const ReductionPlan& plan, int member) const {
  return plan.root_reduces && parts_.sources[member].location != BufferLocation::arena ? plan.root
                                                                                       : member;
}

/// All lines have been seen: finds out whether any member besides the root reduces.
void ShareReduction::assign_root_shares(ReductionPlan& plan) {
  if (!plan.root_reduces) return;
  int others = 0;
  for (int member = 0; member < parts_.segment.size(); ++member)
    others += parts_.sources[member].location == BufferLocation::arena ? 1 : 0;
  if (others == parts_.segment.size())  // no member has filled a window
    return plan.cut(parts_.segment.layout().window_bytes);
  plan.root_fills_late = others > 0 && parts_.sources[plan.root].location == BufferLocation::window;
  if (parts_.segment.rank() != plan.root) return;
  if (plan.root_fills_late) {
    fill_and_publish(plan, 0);
  } else if (others == 0) {
    plan.staged = plan.scaled;
    plan.copies = false;
    parts_.segment.advance(Counter::drained, parts_.segment.at_end());
  }
}

/// Reduces this member's shares of a round and passes on the results. Returns false if a peer has
/// aborted meanwhile; its memory must not be touched any more.
bool ShareReduction::reduce_shares(const ReductionPlan& plan, std::size_t round) {
  const int rank = parts_.segment.rank();
  std::byte* buffer = nullptr;
  if (plan.publishes_results)
    buffer = parts_.segment.result(rank, parts_.results.acquire(parts_.segment.at_step(round + 1),
                                                                Counter::drained, plan.root));
  for (int member = 0; member < parts_.segment.size(); ++member) {
    if (reducer(plan, member) == rank &&
        !reduce_share(plan, round, plan.share(round, parts_.segment.layout().members, member),
                      buffer))
      return false;
  }
  return true;
}

/// Also leaves the result in `buffer`, unless that is null.
bool ShareReduction::reduce_share(const ReductionPlan& plan, std::size_t round, shm::Share share,
                                  std::byte* buffer) {
  const int rank = parts_.segment.rank();
  const std::size_t first =
      (plan.start(round) + share.begin) * plan.element;  // byte offset in the whole input
  const std::size_t bytes = share.count() * plan.element;
  for (std::size_t at = 0; at < bytes; at += fixed::kCacheBlock) {
    if (parts_.segment.peer_aborted()) return false;
    const std::size_t block = std::min(fixed::kCacheBlock, bytes - at);
    for (int member = 0; member < parts_.segment.size(); ++member) {
      const SourceMemory& source = parts_.sources[member];
      const bool windowed =
          member == rank ? plan.scaled : source.location == BufferLocation::window;
      parts_.sources.input(member) =
          windowed ? parts_.segment.window(member, source.first_window + round) +
                         share.begin * plan.element + at
                   : (member == rank ? plan.input.data() : source.data) + first + at;
    }
    // Compute the result directly in one of its destinations, and copy it from there.
    std::byte* to = nullptr;
    if (plan.needs_result(rank)) {
      to = plan.args.outputs[0].data() + first + at;
    } else if (buffer != nullptr) {
      to = buffer + at;
    } else {
      to = outputs_[static_cast<std::size_t>(plan.root)] + first + at;
    }
    parts_.sources.reduce(plan.args, plan.reclaims, to, block);
    if (buffer != nullptr && to != buffer + at) std::memcpy(buffer + at, to, block);
    for (std::byte* output : outputs_) {
      if (output != nullptr && to != output + first + at)
        std::memcpy(output + first + at, to, block);
    }
  }
  return true;
}

/// Copies `member`'s share of a round from its result buffer into this member's output.
void ShareReduction::copy_result(const ReductionPlan& plan, int member, std::size_t round) {
  const shm::Share share = plan.share(round, parts_.segment.layout().members, member);
  const std::byte* const from =
      parts_.segment.result(member, parts_.segment.line(member).first_result + round);
  std::byte* const to =
      plan.args.outputs[0].data() + (plan.start(round) + share.begin) * plan.element;
  const std::size_t bytes = share.count() * plan.element;
  if (plan.reclaims_results) {
    shm::copy_and_reclaim_lines(to, from, bytes);
  } else {
    std::memcpy(to, from, bytes);
  }
}

/// The remaining rounds of a member that reduces nothing.
Task<Status> ShareReduction::stage_rest(const ReductionPlan& plan) {
  for (std::size_t round = 1; round < plan.rounds; ++round) {
    if (!co_await parts_.wait.holds(
            parts_.wait.is_drained(parts_.windows, parts_.segment.sequence())))
      co_return parts_.channel.failure();
    fill_and_publish(plan, round);
    if (parts_.meter.due(plan.length(round) * plan.element)) co_await YieldMeter::yield();
  }
  co_return Status();
}

/// Waits for the windows of a round and for a free result buffer, then reduces.
Task<Status> ShareReduction::reduce_round(const ReductionPlan& plan, std::size_t round) {
  shm::GroupSegment& segment = parts_.segment;
  for (int member = 0; member < segment.size(); ++member) {
    // filled before the line was published
    if (round == 0 && !(plan.root_fills_late && member == plan.root)) continue;
    if (member == segment.rank() || parts_.sources[member].location != BufferLocation::window)
      continue;
    if (!co_await parts_.wait.holds(
            parts_.wait.reached(Counter::filled, segment.at_step(round + 1), member)))
      co_return parts_.channel.failure();
  }
  if (plan.publishes_results) {
    if (!co_await parts_.wait.holds(parts_.wait.is_free(parts_.results)))
      co_return parts_.channel.failure();
  }
  if (!reduce_shares(plan, round)) {
    parts_.failure.abort();  // the peer that aborted first waits to hear that this one stopped
    co_return co_await parts_.failure.cause();
  }
  segment.advance(Counter::reduced,
                  round + 1 < plan.rounds ? segment.at_step(round + 1) : segment.at_end());
  parts_.peers.wake();
  if (parts_.meter.due(plan.length(round) * plan.element)) co_await YieldMeter::yield();
  co_return Status();
}

/// Copies the peers' results of a round.
Task<Status> ShareReduction::copy_results(const ReductionPlan& plan, std::size_t round) {
  shm::GroupSegment& segment = parts_.segment;
  for (int step = 1; step < segment.size(); ++step) {
    const int member = (segment.rank() + step) % segment.size();
    if (reducer(plan, member) == segment.rank()) continue;
    if (!co_await parts_.wait.holds(
            parts_.wait.reached(Counter::reduced, segment.at_step(round + 1), member)))
      co_return parts_.channel.failure();
    copy_result(plan, member, round);
  }
  segment.advance(Counter::drained,
                  round + 1 < plan.rounds ? segment.at_step(round + 1) : segment.at_end());
  parts_.peers.wake();
  co_return Status();
}

Task<Status> ShareReduction::run(const Args& args, const transport::Fingerprint& call) {
  shm::GroupSegment& segment = parts_.segment;
  ReductionPlan plan = this->plan(args);
  place(plan);
  const bool is_root = plan.root == segment.rank();
  if (plan.staged) {
    co_await parts_.wait.holds(parts_.wait.is_drained(parts_.windows, segment.sequence() - 1));
    if (parts_.channel.failed()) co_return parts_.channel.failure();
    // The root cannot know yet whether others reduce. If they do, it fills its window later
    // (`assign_root_shares`).
    if (!plan.root_reduces || !is_root || plan.scaled) fill_input(plan, 0);
  }
  const bool reduces = !plan.root_reduces || is_root || !plan.staged;
  if (!reduces) segment.advance(Counter::reduced, segment.at_end());
  if (!plan.copies) segment.advance(Counter::drained, segment.at_end());
  parts_.lines.publish(call);
  if (!reduces) co_return co_await stage_rest(plan);

  parts_.wait.for_lines();
  if (!co_await parts_.wait.holds([&] { return parts_.lines.poll_all(segment.sequence()); }))
    co_return parts_.channel.failure();
  if (!co_await parts_.wait.holds([&] { return all_mapped(plan); }))
    co_return parts_.channel.failure();
  Status resolved = resolve(plan);
  if (!resolved) co_return co_await parts_.failure.fail_after_grace(std::move(resolved));
  assign_root_shares(plan);

  // Filling is one window ahead of reducing, and reducing is one ahead of copying, so no member
  // waits for a step that has only just begun.
  for (std::size_t turn = 0; turn < plan.rounds + 1; ++turn) {
    if (plan.staged && turn + 1 < plan.rounds) {
      if (!co_await parts_.wait.holds(parts_.wait.is_free(parts_.windows)))
        co_return parts_.channel.failure();
      fill_and_publish(plan, turn + 1);
    }
    if (turn < plan.rounds) {
      if (Status reduced = co_await reduce_round(plan, turn); !reduced) co_return reduced;
    }
    if (plan.copies && turn > 0) {
      if (Status copied = co_await copy_results(plan, turn - 1); !copied) co_return copied;
    }
  }
  if (!co_await parts_.wait.holds(parts_.wait.reached(Counter::reduced, segment.at_end())))
    co_return parts_.channel.failure();
  parts_.windows.release_all();
  co_return Status();
}

}  // namespace muster::collective::region
