// SPDX-License-Identifier: BSD-3-Clause
/// A call's metadata, for the flight recorder, the log and errors, and its deadline. Plain data:
/// the caller fills it in, the engine reads it.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "core/base/log/log.h"
#include "core/trace/recorder.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::collective {

/// Must live until the caller's wait for the call ends; for a call that continues without the
/// caller, until it has been started.
struct CallRecord {
  CallRecord() = default;
  /// For a call that is not recorded.
  explicit CallRecord(TimePoint until) : deadline(until) {}

  // Set by the caller.
  std::string_view name = {};           ///< of the called function; a literal
  std::string_view group = {};          ///< name of the group, for the log
  trace::Recorder* recorder = nullptr;  ///< null: not recorded
  std::uint16_t recorded_group = 0;     ///< the recorder's id of the group
  trace::RecordedCall traced = {};      ///< what is recorded, except the sequence number
  Duration timeout{-1};                 ///< from the start; negative: none
  TimePoint deadline{};                 ///< epoch: computed from `timeout` at the start
  TimePoint begun{};                    ///< epoch if the deadline was given: unknown
  /// For calls of `Communicator::start`, if `prepares_calls`: runs right before the call reads its
  /// inputs, after all earlier calls have ended, on any thread, and must not wait. A failure fails
  /// the group. Copied when the call is started.
  const std::function<Status()>* prepare = nullptr;
  /// For tests: called once the call has started.
  const std::function<void()>* when_started = nullptr;

  // Set by the engine.
  bool started = false;
  /// The call completed when it started, without waiting.
  bool completed_inline = false;
  trace::Ticket ticket = {};

  /// Starts the deadline.
  void arm() noexcept {
    if (deadline != TimePoint()) return;
    begun = steady_clock().now();
    const bool unlimited = timeout < Duration::zero() || timeout >= TimePoint::max() - begun;
    deadline = unlimited ? TimePoint::max() : begun + timeout;
  }
  /// The call has its sequence number (0: a message), and the other members may know of it. Runs
  /// once per call, on the calling thread, before that thread waits for more than a few
  /// microseconds. Later invocations do nothing.
  void on_started(std::uint64_t number) noexcept {
    if (started) return;
    started = true;
    arm();
    traced.sequence = number;
    if (recorder != nullptr) recorder->begin(recorded_group, traced, begun, ticket);
    if (logs_calls() || when_started != nullptr) [[unlikely]]
      log_start();
  }
  /// The call has ended, successfully or not.
  void on_ended() noexcept {
    if (recorder != nullptr) recorder->end(ticket, completed_inline ? begun : steady_clock().now());
  }
  void on_failed(std::string_view why) noexcept {
    if (recorder != nullptr) recorder->fail(ticket, why, steady_clock().now());
  }

 private:
  static bool logs_calls() noexcept { return logs(LogLevel::trace); }
  void log_start() noexcept;
};

}  // namespace muster::collective
