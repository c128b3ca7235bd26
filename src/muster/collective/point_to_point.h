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

/// Of a send or recv.
inline std::size_t message_bytes(const Args& args) {
  return args.op == Op::recv ? args.outputs.front().size() : args.inputs.front().size();
}

inline transport::Fingerprint header_of(DType dtype) {
  transport::Fingerprint header;
  header.op = static_cast<std::uint8_t>(Op::send);
  header.dtype = static_cast<std::uint8_t>(dtype);
  return header;
}

class PointToPoint {
 public:
  explicit PointToPoint(const GroupContext& group) : group_(group) {}

  class Message;

  /// Posts a message, which holds `owner` until it is over. `member` may be kAnyMember for a
  /// receive. What is thrown is thrown before the message is on its way, or by the channel, which
  /// has to be failed then.
  std::shared_ptr<Message> send(std::shared_ptr<Driver> driver, int member, std::uint64_t tag,
                                ConstBytes data, DType dtype, TimePoint deadline,
                                std::shared_ptr<void> owner);
  std::shared_ptr<Message> receive(std::shared_ptr<Driver> driver, int member, std::uint64_t tag,
                                   MutableBytes data, DType dtype, TimePoint deadline,
                                   std::shared_ptr<void> owner);

  /// The same in two steps: the message that `args` tell of is on its way; and is looked after from
  /// here on, until it is over.
  transport::TransferRef post(const Args& args);
  std::shared_ptr<Message> follow(std::shared_ptr<Driver> driver, const Args& args,
                                  const transport::TransferRef& transfer, TimePoint deadline);

  /// Sends the message that `args` tell of; null where it has gone already.
  transport::TransferRef send_off(const Args& args) {
    return group_.channel->send_off(args.root, args.tag, args.inputs.front(),
                                    header_of(args.dtype));
  }
  /// The message that `args` ask for, without a transfer.
  transport::Taken take_at_once(const Args& args) {
    return group_.channel->receive_at_once(args.root, args.tag, args.outputs.front(),
                                           header_of(args.dtype));
  }

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
  std::shared_ptr<Message> posted(std::shared_ptr<Driver> driver, const Args& args,
                                  TimePoint deadline, std::shared_ptr<void> owner);
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
