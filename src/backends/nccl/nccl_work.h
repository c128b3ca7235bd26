// SPDX-License-Identifier: BSD-3-Clause
/// Why a group's backend can no longer be used.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/message_order.h"
#include "backends/nccl/transfers.h"
#include "core/wait/callbacks.h"
#include "muster/clock.h"
#include "muster/init.h"
#include "muster/status.h"
#include "muster/work.h"

namespace muster::nccl {
/// The first failure stays. Thread-safe; shared by a backend and its Works.
class GroupFailure {
 public:
  /// Returns whether it is the first.
  bool set(Status why) {
    const std::lock_guard lock(mutex_);
    if (!why_.ok()) return false;
    why_ = std::move(why);
    failed_.store(true, std::memory_order_release);
    return true;
  }
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status why() const {
    const std::lock_guard lock(mutex_);
    return why_;
  }
  void show() { shown_ = true; }
  bool was_shown() const { return shown_; }

 private:
  mutable std::mutex mutex_;
  Status why_;                       // under mutex_; final once failed_ is true
  std::atomic<bool> failed_{false};  // set after why_
  std::atomic<bool> shown_{false};
};

/// Posts the messages that this thread has held back (message_batch.h).
void post_open_batches();

// A call that NCCL carries out.

/// For the user it is completed once it is enqueued: its outputs are usable on the stream of the
/// call (a synchronous one) or, after `wait`, on the caller's current stream. If the user asked for
/// blocking waits, `wait` returns when the device is done. The device's work may still fail; the
/// group then fails, and later calls and waits throw why.
class NcclWork final : public Work, public std::enable_shared_from_this<NcclWork> {
 public:
  struct NcclWorkTerms {
    std::string name;      ///< of the function
    std::uint64_t number;  ///< 0: a message
    int source = -1;       ///< of a receive: rank of the default group
    Duration timeout{};    ///< for words
    TimePoint deadline{};
    bool blocking_wait = false;
    bool is_async = false;
    std::string other_end = {};  ///< of a message: "rank 1 had not called the matching recv"
    MessageSize size = {};       ///< of a message
    /// Runs callbacks of the futures of a group's collectives, in the order of the calls. Null: a
    /// message.
    std::shared_ptr<CallbackLane> callbacks = {};
  };
  NcclWork(NcclTransferPlan plan, NcclWorkTerms terms, c10::Device device,
           std::shared_ptr<GroupFailure> failure);

  const NcclWorkTerms& terms() const { return terms_; }
  /// For the thread that enqueues it. `own` is the communicator's stream, for asynchronous calls;
  /// synchronous ones run on the stream that was current when they were made.
  void launch(NcclCommunicator& communicator, const c10::Stream& own,
              const NcclCommunicator::GiveUp& give_up);
  /// Launches messages of one communicator as one group: on its stream, or if they are part of a
  /// captured graph, on the stream that the first of them was called on. Throws DistBackendError if
  /// only some of them are captured.
  static void launch_together(const std::vector<std::shared_ptr<NcclWork>>& works,
                              NcclCommunicator& communicator, const c10::Stream& own,
                              const NcclCommunicator::GiveUp& give_up);
  /// The call cannot be carried out. Later ones have no effect.
  void fail(std::exception_ptr error);

  /// Blocks until it is enqueued or has failed; throws the failure.
  void wait_until_launched();
  /// Blocks until the device has carried it out, or the group has failed. Throws the failure, or
  /// that it was not done within `timeout`.
  void wait_until_done(std::optional<Duration> timeout);
  /// Whether what precedes an asynchronous call on its caller's stream is done, so that its kernel
  /// will wait for its peers alone; or it is part of a captured graph, or has failed. Never blocks.
  bool is_ready();
  /// The device has carried it out. Never blocks.
  bool is_done();
  /// Why the device could not say so; empty: it could.
  std::string device_error() const;
  bool is_launched() const;
  /// A message has been posted to its other rank, and then both of its ends: from there on it only
  /// waits for its turn. Any thread may ask.
  void note_posted() { stage_ = MessageStage::posted; }
  void note_met() { stage_ = MessageStage::met; }
  bool waits_for_peer() const { return stage_ == MessageStage::posted; }
  /// Why a message was not launched within its timeout.
  std::string why_not_launched() const;
  /// Whether it is a part of a captured graph, which says nothing of when it is done.
  bool is_captured() const { return captured_; }
  /// Lets go of the tensors. Call when the device is done with them.
  void release();
  /// Whether the device had carried it out before any failure.
  bool is_released() const;

  bool is_completed() override;
  bool is_success() override;
  bool wait(std::optional<Duration> timeout = {}) override;
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override;
  int source_rank() override;
  std::exception_ptr exception() override;
  std::vector<at::Tensor> result() override;

 private:
  bool await_launch(std::unique_lock<std::mutex>& lock, TimePoint limit);
  /// queued -> launched, by the lane; either -> failed, by the lane or the watch. `error_`, `end_`
  /// and `stream_` are set with the state and do not change afterwards.
  enum class LaunchState { queued, launched, failed };
  enum class MessageStage { held, posted, met };
  void throw_failure();
  /// Whether it is done; false if the device cannot say so. Requires mutex_.
  bool query(c10::Event& event);
  /// Everything is on `stream`.
  void note_launched(const c10::Stream& stream);
  /// Completes the future, whose callbacks are the program's: on a thread for these.
  void complete(c10::intrusive_ptr<c10::ivalue::Future> future, std::exception_ptr error = {});

  const NcclWorkTerms terms_;
  const c10::Device device_;
  const c10::Stream caller_;  // current when the call was made
  const std::shared_ptr<GroupFailure> failure_;
  std::optional<c10::Event> ready_;       // the inputs of an asynchronous call
  std::optional<NcclTransfer> transfer_;  // the lane's until it is launched, then under mutex_
  std::vector<at::Tensor> results_;
  bool captured_ = false;
  std::atomic<MessageStage> stage_{MessageStage::held};

  mutable std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  LaunchState state_ = LaunchState::queued;
  std::exception_ptr error_;
  std::string device_error_;
  std::optional<c10::Event> end_;
  std::optional<c10::Stream> stream_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  // Set with future_: null if its callbacks have no order, and the world of the thread that asked.
  std::shared_ptr<CallbackLane> callbacks_;
  std::weak_ptr<WorldScope> world_;
};

}  // namespace muster::nccl
