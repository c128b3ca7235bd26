// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/engine/pass_loop.h"
#include "core/tunables/tunables.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace muster::transport {

/// Polls everything once. Under the lock.
bool PassLoop::pass() {
  PassState& state = engine_.pass;
  const TimePoint now = state.time = engine_.now();
  state.taken_since = 0;
  bool moved = engine_.connector.poll(now);  // cheap without news
  state.connector_timer = engine_.connector.next_timer();
  const bool may_set_aside = pollers_active() && signal_.is_open() && !signal_.armed();
  moved |= links_.poller.poll(may_set_aside, [this](Link& l) { links_.writer.mark_dirty(l); });
  links_.writer.flush();
  if (now >= state.next_duty) duties_.on_due(now);
  return moved;
}

PassLoop::Looked PassLoop::look(bool thorough, TimePoint& now) {
  const bool may = !engine_.forked();
  if (may && thorough) {
    lock_.lock();
    links_.poller.look_at_descriptors();
  } else if (!may || !lock_.try_lock()) {
    now = engine_.now();
    return Looked::busy;
  }
  polls_.store(polls() + 1, std::memory_order_relaxed);
  const bool moved = pass();
  now = engine_.pass.time;
  release();
  return moved ? Looked::moved : Looked::idle;
}

void PassLoop::poll_peer(int rank) {
  if (engine_.forked() || !lock_.try_lock()) return;
  links_.poller.poll_plain(links_.find(rank));
  release();
}

void PassLoop::release() {
  if (!links_.writer.idle()) links_.writer.flush();
  const bool wake_sleepers = std::exchange(engine_.pass.completed, false);
  const bool kick = watcher_oversleeps();
  lock_.unlock();
  if (wake_sleepers) engine_.mailbox().wake();
  if (kick) signal_.kick();
}

TimePoint PassLoop::watch_pass() {
  lock_.lock();
  // A waiting thread may be busy inside its `done` function. The watcher then polls in its place.
  const bool used = polls() != watched_.polls;
  watched_.polls = polls();
  const TimePoint now = engine_.now();
  bool moved = false;
  if (used && pollers_active()) {
    if (now >= engine_.pass.next_duty) duties_.on_due(now);
  } else {
    links_.poller.look_at_descriptors();
    moved = pass();
  }
  if (used || moved) watched_.news = now;
  const TimePoint wake = due();
  watched_.wakes = wake;
  watched_.knows_plain = looks_at_plain();
  release();
  return wake;
}

void PassLoop::arm_watcher() {
  lock_.lock();
  const bool was_armed = signal_.set_armed();
  if (!was_armed) links_.poller.end_aside();
  lock_.unlock();
  if (!was_armed) signal_.watch_news();
}

/// Whether periodic polls are needed because there are, or may be, links without a descriptor.
bool PassLoop::looks_at_plain() const {
  return links_.poller.has_plain_links() || engine_.region != nullptr ||
         (engine_.connector.descriptor() < 0 && engine_.world_size() > 1);
}

/// Whether work is due before the watcher wakes by itself. Called after every message, so the clock
/// is read only if the watcher's known wake-up time may be too late.
bool PassLoop::watcher_oversleeps() {
  if (!signal_.is_open()) return false;
  const PassState& state = engine_.pass;
  const bool known = links_.writer.idle() && (watched_.knows_plain || !looks_at_plain());
  const TimePoint wake = known ? std::min(state.next_duty, state.connector_timer) : due();
  if (wake >= watched_.wakes) return false;
  watched_.wakes = wake;
  return true;
}

TimePoint PassLoop::next_wake() {
  const LoopEntry entry(*this);
  return due();
}

/// When the next poll is due without any event. Under the lock.
TimePoint PassLoop::due() const {
  // Input on links without descriptors must be polled while no thread waits. (Deaths are reported
  // by descriptors, and waiting threads are woken by the writer.) Once the fabric has been unused
  // for a second, these polls are as rare as heartbeats and usually coincide with them.
  constexpr Duration kLookWhileIdle = std::chrono::milliseconds(250);  // limit: of a heartbeat
  constexpr Duration kIdleAfter = std::chrono::seconds(1);             // limit: nothing moves
  constexpr Duration kWhileUnwritten = std::chrono::milliseconds(5);   // limit: a stuck peer
  const PassState& state = engine_.pass;
  const TimePoint wake = std::min(state.next_duty, state.connector_timer);
  if (!engine_.options.threads) return wake;
  if (!links_.writer.idle()) {
    const bool at_once = !pollers_active() && links_.writer.could_write_more();
    return std::min(wake, engine_.now() + (at_once ? Duration::zero() : kWhileUnwritten));
  }
  if (!looks_at_plain()) return wake;
  const TimePoint now = engine_.now();
  const Duration look =
      now - kIdleAfter < watched_.news ? tunables().progress_idle_tick : kLookWhileIdle;
  return std::min(wake, now + std::min(look, engine_.heartbeat_interval()));
}

}  // namespace muster::transport
