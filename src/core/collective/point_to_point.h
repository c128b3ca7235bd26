// SPDX-License-Identifier: BSD-3-Clause
/// The messages of one communicator that users send and receive.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/completion.h"
#include "core/collective/queue/driver.h"

namespace muster::collective {

class PointToPoint {
 public:
  explicit PointToPoint(const GroupContext& group) : group_(group) {}

  class Message;

  /// Posts the message described by valid `args` and holds `owner` until it has ended. An exception
  /// is thrown either before the message is posted, or by the channel, which must then be failed.
  std::shared_ptr<Message> start(std::shared_ptr<Driver> driver, const Args& args,
                                 CallRecord& record, std::shared_ptr<void> owner);
  /// Runs a whole message from or to a named member, if it completes inline or within one round
  /// trip. Returns null if it has completed successfully; otherwise the message is outstanding and
  /// needs `follow`. Throws like `start`. `idle`: the caller's thread has no other work of the
  /// group.
  transport::TransferRef run_inline(const Args& args, CallRecord& record, bool idle);
  /// Tracks an outstanding message of this thread.
  std::shared_ptr<Message> follow(std::shared_ptr<Driver> driver, const Args& args,
                                  const transport::TransferRef& transfer, TimePoint deadline);

  /// Publishes messages that have ended. Never blocks.
  void sweep();
  bool empty() const { return open_count_.load() == 0; }
  TimePoint next_deadline();
  /// Cancels messages that are past their deadline.
  void check_deadlines(TimePoint now);
  /// Whether no send is outstanding.
  bool sends_done();
  /// Cancels every receive without a matching message, and all that are posted later.
  void cancel_receives(const std::string& why);

 private:
  transport::TransferRef post(const Args& args);
  transport::TransferRef receive_inline(const Args& args, CallRecord& record, bool idle);
  std::shared_ptr<Message> make(std::shared_ptr<Driver> driver, const Args& args,
                                TimePoint deadline, std::shared_ptr<void> owner);
  class Reservation;
  void track(Reservation& place, const std::shared_ptr<Message>& message);

  const GroupContext& group_;
  // Guards all below. A message's own lock may be taken under it. `settle` and the channel's calls
  // run without it.
  std::mutex lock_;
  std::vector<std::shared_ptr<Message>> open_;
  std::size_t reserved_ = 0;                // room in `open_` for messages that are being posted
  std::atomic<std::size_t> open_count_{0};  // of `open_`, read without the lock
  std::string cancelled_;                   // why receives are cancelled; empty: they are not
};

class PointToPoint::Message final : public Completion {
 public:
  struct MessageEnvelope {
    bool receives;
    int member;
    std::uint64_t tag;
    std::size_t bytes;
    DType dtype;
  };
  Message(const GroupContext& group, std::shared_ptr<Driver> driver, MessageEnvelope envelope,
          TimePoint deadline, std::shared_ptr<void> owner);

  bool done() const override;
  Status wait(TimePoint deadline) override;
  int source() const override {
    return published() && envelope_.receives && status().ok() ? transfer_->source() : -1;
  }
  std::size_t bytes() const override {
    return published() && status().ok() ? transfer_->bytes() : 0;
  }

 private:
  friend class PointToPoint;
  /// Publishes the transfer's result if it has ended. Returns whether the message has ended.
  bool settle();
  /// Cancels the transfer. The message ends with `why` unless it had already succeeded.
  void cancel(Status why);
  void check_deadline(TimePoint now);
  std::string text() const;
  std::shared_ptr<Driver> driver();

  // `lock_` guards `driver_`, `owner_` and the two members about cancelling.
  const GroupContext& group_;
  std::shared_ptr<Driver> driver_;  // until it has ended
  const MessageEnvelope envelope_;
  transport::TransferRef transfer_;  // set once posted, before any other thread knows of the
                                     // message
  std::shared_ptr<void> owner_;      // of its memory, until it has ended
  const TimePoint created_at_;
  const TimePoint deadline_;
  bool cancel_requested_ = false;
  Status cancel_reason_;
};

}  // namespace muster::collective
