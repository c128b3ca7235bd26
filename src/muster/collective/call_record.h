/// What is told of a call besides its memory: to the outstanding recorder, to the log, in errors;
/// and how long it may take. Data alone: who makes a call fills it in, the engine goes by it.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "muster/base/clock.h"
#include "muster/base/log.h"
#include "muster/base/quick_clock.h"
#include "muster/trace/recorder.h"

namespace muster::collective {

/// Lives as long as the caller waits for its call; of a call that goes on without the caller, until
/// it has been started.
struct CallRecord {
  CallRecord() = default;
  /// Of a call of which nothing is recorded.
  explicit CallRecord(TimePoint until) : deadline(until) {}

  // By the caller.
  std::string_view name = {};           ///< of the function that was called; a literal
  std::string_view group = {};          ///< its name, for the log
  trace::Recorder* recorder = nullptr;  ///< null: it is not recorded
  std::uint16_t recorded_group = 0;     ///< what the recorder calls the group
  trace::Call traced = {};              ///< what is recorded, but for the number
  Duration timeout{-1};                 ///< from the start; below zero: none
  TimePoint deadline{};                 ///< the epoch: counted from the start by `timeout`
  TimePoint begun{};                    ///< the epoch where the deadline was given: not known
  /// For tests: called once the call has started.
  const std::function<void()>* when_started = nullptr;

  // By the engine.
  bool started = false;
  /// The call was over as soon as it had started: what it needed was there, and it has not waited.
  bool completed_inline = false;
  trace::Ticket ticket = {};

  /// Counts the deadline from now on.
  void arm() noexcept {
    if (deadline != TimePoint()) return;
    begun = quick_now();
    const bool unlimited = timeout < Duration::zero() || timeout >= TimePoint::max() - begun;
    deadline = unlimited ? TimePoint::max() : begun + timeout;
  }
  /// The call has got its number (0: a message) and the other members may know of it. Every call
  /// comes by here once, on the thread that makes it, before it waits for longer than some
  /// microseconds; the first time counts.
  void on_started(std::uint64_t number) noexcept {
    if (started) return;
    started = true;
    arm();
    traced.sequence = number;
    if (recorder != nullptr) recorder->begin(recorded_group, traced, begun, ticket);
    if (logs_calls() || when_started != nullptr) [[unlikely]]
      tell();
  }
  /// It has ended, well or badly.
  void on_ended() noexcept {
    if (recorder != nullptr) recorder->end(ticket, completed_inline ? begun : quick_now());
  }
  void on_failed(std::string_view why) noexcept {
    if (recorder != nullptr) recorder->fail(ticket, why, steady_clock().now());
  }

 private:
  static bool logs_calls() noexcept { return logs(LogLevel::trace); }
  void tell() noexcept;
};

}  // namespace muster::collective
