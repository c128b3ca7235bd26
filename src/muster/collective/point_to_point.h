/// The messages of one communicator that users send and receive.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "muster/collective/communicator.h"
#include "muster/collective/completion.h"
#include "muster/collective/driver.h"

namespace muster::collective {

class PointToPoint {
 public:
  explicit PointToPoint(const GroupContext& group) : group_(group) {}

  class Message;

  /// Posts the message that valid `args` tell of, which holds `owner` until it is over. What is
  /// thrown is thrown before the message is on its way, or by the channel, which has to be failed
  /// then.
  std::shared_ptr<Message> start(std::shared_ptr<Driver> driver, const Args& args,
                                 CallRecord& record, std::shared_ptr<void> owner);
  /// The whole message, from or to a named member, where it has gone at once or comes in the time
  /// of a round trip: then nobody need look after it. Else it is on its way, and `follow` does.
  /// Throws as `start`. Null: it is over, with success. `alone`: the caller's thread has nothing
  /// else of the group to do.
  transport::TransferRef run_inline(const Args& args, CallRecord& record, bool alone);
  /// Looks after a message of this thread's that is on its way.
  std::shared_ptr<Message> follow(std::shared_ptr<Driver> driver, const Args& args,
                                  const transport::TransferRef& transfer, TimePoint deadline);

  /// Publishes the messages that are over. Never blocks.
  void sweep();
  bool empty() const { return open_count_.load() == 0; }
  TimePoint next_deadline();
  /// Takes back what is past its deadline.
  void check_deadlines(TimePoint now);
  /// Whether no send is under way.
  bool sends_over();
  /// Takes back every receive that nothing has come for, and any that is posted after.
  void cancel_receives(const std::string& why);

 private:
  transport::TransferRef post(const Args& args);
  transport::TransferRef receive_inline(const Args& args, CallRecord& record, bool alone);
  std::shared_ptr<Message> make(std::shared_ptr<Driver> driver, const Args& args,
                                TimePoint deadline, std::shared_ptr<void> owner);
  class Place;
  void track(Place& place, const std::shared_ptr<Message>& message);

  const GroupContext& group_;
  std::mutex lock_;
  std::vector<std::shared_ptr<Message>> open_;
  std::size_t reserved_ = 0;  // places in it for messages that are being posted
  std::atomic<std::size_t> open_count_{0};
  std::string cancelled_;  // why receives are taken back; empty: they are not
};

class PointToPoint::Message final : public Completion {
 public:
  struct Envelope {
    bool receives;
    int member;
    std::uint64_t tag;
    std::size_t bytes;
    DType dtype;
  };
  Message(const GroupContext& group, std::shared_ptr<Driver> driver, Envelope envelope,
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
  /// Publishes the transfer's end if it has come; says whether the message is over.
  bool settle();
  /// Takes it back; it then ends with `why` unless it had already succeeded.
  void take_back(Status why);
  void check_deadline(TimePoint now);
  std::string text() const;
  std::shared_ptr<Driver> driver();

  const GroupContext& group_;
  std::shared_ptr<Driver> driver_;  // until it is over
  const Envelope envelope_;
  transport::TransferRef transfer_;  // once it is on its way, before anybody else knows of it
  std::shared_ptr<void> owner_;      // of its memory, until it is over
  const TimePoint made_;
  const TimePoint deadline_;
  bool taken_back_ = false;
  Status why_;
};

}  // namespace muster::collective
