// SPDX-License-Identifier: BSD-3-Clause
/// The parts of one member's side of a group, shared by the three ways to execute a call.
#pragma once

#include <algorithm>
#include <coroutine>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/time/task.h"
#include "core/collective/region/call_failure.h"
#include "core/collective/region/control_lines.h"
#include "core/collective/region/source_table.h"
#include "core/collective/region/transfer_plan.h"
#include "core/collective/select/selection.h"
#include "core/shm/group_peers.h"
#include "core/shm/group_segment.h"
#include "core/shm/host_region.h"
#include "core/transport/channel/channel.h"
#include "core/wait/topology.h"

namespace muster::collective::region {

/// The conditions that a member's running task waits for, and the members that have not met them
/// yet.
class CallWait {
 public:
  CallWait(const shm::GroupSegment& segment, ControlLines& lines, const transport::Channel& channel)
      : segment_(segment), lines_(lines), channel_(channel) {}
  CallWait(const CallWait&) = delete;
  CallWait& operator=(const CallWait&) = delete;

  void for_nothing() { target_.what = WaitTarget::nothing; }
  void for_room() { target_ = {WaitTarget::room}; }
  /// `only`: one member; -1: all members.
  void for_lines(int only = -1) { target_ = {WaitTarget::lines, shm::Counter::filled, only}; }
  void for_counter(shm::Counter counter, shm::Position until, int only = -1) {
    target_ = {WaitTarget::counter, counter, only, until};
  }

  /// Whether the counters of all peers, or of one, have reached a position.
  class Reached {
   public:
    Reached(const shm::GroupSegment& segment, shm::Counter counter, shm::Position until, int only)
        : segment_(segment),
          counter_(counter),
          until_(until),
          next_(only < 0 ? 0 : only),
          end_(only < 0 ? segment.size() : only + 1) {}
    bool operator()() {
      for (; next_ < end_; ++next_) {
        if (next_ != segment_.rank() && !shm::reached(segment_.counter(next_, counter_), until_))
          return false;
      }
      return true;
    }

   private:
    const shm::GroupSegment& segment_;
    shm::Counter counter_;
    shm::Position until_;
    int next_;
    const int end_;
  };
  /// Whether the next buffer of a ring is free.
  Reached is_free(const shm::BufferRing& ring) {
    const shm::BufferUse& use = ring.last_use_of_next();
    if (use.pending) return reached(use.counter, use.until, use.reader);
    return {segment_, use.counter, 0, segment_.rank()};  // an empty range: true at once
  }
  Reached reached(shm::Counter counter, shm::Position until, int only = -1) {
    for_counter(counter, until, only);
    return {segment_, counter, until, only};
  }
  /// Like `is_free`, but also polls the peers' lines up to `limit`: a peer that has made a
  /// different call may never drain the buffer, and its line shows that.
  class FreeOrPolled {
   public:
    FreeOrPolled(Reached free, ControlLines& lines, std::uint64_t limit)
        : free_(free), lines_(lines), limit_(limit) {}
    bool operator()() {
      if (free_()) return true;
      lines_.poll_all(limit_);
      return false;
    }

   private:
    Reached free_;
    ControlLines& lines_;
    std::uint64_t limit_;
  };
  FreeOrPolled is_drained(const shm::BufferRing& ring, std::uint64_t limit) {
    return {is_free(ring), lines_, limit};
  }

  /// `co_await holds(condition)` in a published call: waits until the condition holds or the
  /// channel has failed, and returns whether it holds. Data that arrived before the failure counts,
  /// because the member that failed the channel had read it or produced it.
  template <class Condition>
  class Holds {
    struct Either {
      Holds* wait;
      bool operator()() { return wait->condition_() || wait->channel_.failed(); }
    };

   public:
    Holds(const transport::Channel& channel, Condition condition)
        : channel_(channel), condition_(std::move(condition)) {}
    Holds(const Holds&) = delete;
    Holds& operator=(const Holds&) = delete;
    bool await_ready() { return either_.await_ready(); }
    template <class Promise>
    void await_suspend(std::coroutine_handle<Promise> self) {
      either_.await_suspend(self);
    }
    bool await_resume() {
      either_.await_resume();
      return condition_();
    }

   private:
    const transport::Channel& channel_;
    Condition condition_;
    until<Either> either_{Either{this}};
  };
  template <class Condition>
  Holds<Condition> holds(Condition condition) const {
    return Holds<Condition>(channel_, std::move(condition));
  }

  /// Whether `member` has not yet done what the task waits for, even if the task waits for another
  /// member only. (Always true for a member that has no part in it.)
  bool is_behind(int member) const;
  /// Job ranks that the task waits for. If some of them have not begun the call, only those.
  std::vector<int> awaited() const;

 private:
  enum class WaitTarget : std::uint8_t { nothing, room, lines, counter };
  struct Target {
    WaitTarget what = WaitTarget::nothing;
    shm::Counter counter = shm::Counter::filled;
    int only = -1;
    shm::Position until = 0;
  };

  const shm::GroupSegment& segment_;
  ControlLines& lines_;
  const transport::Channel& channel_;
  Target target_;
};

/// Tells a task when it has moved enough data to yield its thread.
class YieldMeter {
 public:
  explicit YieldMeter(shm::GroupPeers& peers) : peers_(peers) {}
  /// `if (meter.due(bytes)) co_await YieldMeter::yield();`
  bool due(std::size_t bytes);
  /// Yields the thread once.
  static auto yield() {
    return until([asked = 0]() mutable { return asked++ > 0; });
  }

 private:
  shm::GroupPeers& peers_;
  std::size_t moved_ = 0;
};

struct MemberParts {
  MemberParts(shm::HostRegion& region, std::uint64_t segment_offset, transport::Channel& channel,
              const Selection& selection, ArenaOf arena);

  void begin_call(std::uint64_t sequence);
  /// For tests: as if all members had made the calls up to `sequence`, without windows. All earlier
  /// calls must have ended everywhere.
  void count_from(std::uint64_t sequence);
  /// Leaves the segment (`GroupSegment::leave`).
  bool leave();
  /// Whether every reader computes this all_reduce or reduce for itself. Otherwise each member
  /// reduces its share.
  bool one_shot(Op op, std::size_t bytes) const {
    return selection.choose(op, bytes) == Algorithm::one_shot;
  }

  transport::Channel& channel;
  const Selection selection;
  const Topology topology;
  const bool may_block;  ///< false in simulations, which run all ranks as fibers of one thread
  shm::GroupSegment segment;
  shm::GroupPeers peers;
  shm::DirectReads direct_reads;
  shm::BufferRing windows, results;
  ControlLines lines;
  CallWait wait;
  CallFailure failure;
  Quiescence quiescence;
  SourceTable sources;
  const TransferPlanner planner;
  BufferPlacement placement;
  YieldMeter meter;

 private:
  void refresh();
};

}  // namespace muster::collective::region
