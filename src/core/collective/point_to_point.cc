// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/point_to_point.h"

#include <algorithm>

#include "core/collective/op.h"
#include "core/tunables/tunables.h"

namespace muster::collective {

using Message = PointToPoint::Message;

namespace {

/// For a send or recv.
std::size_t message_bytes(const Args& args) {
  return args.op == Op::recv ? args.outputs.front().size() : args.inputs.front().size();
}

transport::Fingerprint header_of(DType dtype) {
  transport::Fingerprint header;
  header.op = static_cast<std::uint8_t>(Op::send);
  header.dtype = static_cast<std::uint8_t>(dtype);
  return header;
}

}  // namespace

Message::Message(const GroupContext& group, std::shared_ptr<Driver> driver,
                 MessageEnvelope envelope, TimePoint deadline, std::shared_ptr<void> owner)
    : group_(group),
      driver_(std::move(driver)),
      envelope_(envelope),
      owner_(std::move(owner)),
      created_at_(group.now()),
      deadline_(deadline) {}

std::shared_ptr<Driver> Message::driver() {
  const std::lock_guard guard(lock_);
  return driver_;
}

std::string Message::text() const {
  const std::string what = std::to_string(envelope_.bytes / size_of(envelope_.dtype)) +
                           " elements of " + std::string(name_of(envelope_.dtype));
  const std::string peer = envelope_.member == transport::kAnyMember
                               ? "any rank"
                               : "rank " + std::to_string(group_.job_rank_of(envelope_.member));
  return (envelope_.receives ? "recv of " + what + " from " : "send of " + what + " to ") + peer +
         " with tag " + std::to_string(envelope_.tag) + " in " + group_.here();
}

bool Message::settle() {
  if (published()) return true;
  if (!transfer_->done()) return false;
  Status status = transfer_->status();
  std::shared_ptr<Driver> dropped_driver;
  std::shared_ptr<void> owner;
  {
    const std::lock_guard guard(lock_);
    if (!status.ok() && cancel_requested_ && !group_.channel->failed()) status = cancel_reason_;
    dropped_driver = std::move(driver_);
    owner = std::move(owner_);
  }
  const Notices notices = publish(status.ok() ? status : status.with_context(text()));
  for (const auto& notice : notices) notice(this->status());
  return true;
}

void Message::cancel(Status why) {
  {
    const std::lock_guard guard(lock_);
    if (cancel_requested_ || published()) return;
    cancel_requested_ = true;
    cancel_reason_ = std::move(why);
  }
  group_.channel->cancel(transfer_);
}

void Message::check_deadline(TimePoint now) {
  if (now < deadline_ || settle()) return;
  std::vector<int> ranks;
  if (envelope_.member != transport::kAnyMember)
    ranks.push_back(group_.job_rank_of(envelope_.member));
  const std::string last_call = group_.peer_traces && !ranks.empty()
                                    ? group_.peer_traces->tell(group_.name, ranks)
                                    : std::string();
  cancel(Status(
      Code::timed_out,
      "it did not complete within " + describe(now - created_at_) + last_call +
          (envelope_.receives ? "; see whether the sender has sent with this tag"
                              : "; see whether the receiver has posted a receive with this tag"),
      std::move(ranks)));
}

bool Message::done() const {
  auto* self = const_cast<Message*>(this);
  if (self->settle()) return true;
  if (const auto driver = self->driver()) {
    driver->fabric()->poll();
    driver->advance();
    if (const TimePoint now = group_.now(); now >= deadline_) self->check_deadline(now);
  }
  return self->settle();
}

Status Message::wait(TimePoint deadline) {
  if (settle()) return status();
  const auto driver = this->driver();
  if (driver != nullptr && !driver->drive_until([this] { return settle(); }, deadline)) {
    return Status(Code::timed_out, "the wait for the " + text() +
                                       " timed out; the message itself is still outstanding");
  }
  settle();
  return status();
}

/// Reserves an entry among the open messages before the message is posted: nothing after that may
/// fail.
class PointToPoint::Reservation {
 public:
  explicit Reservation(PointToPoint& all) : all_(all) {
    const std::lock_guard guard(all_.lock_);
    const std::size_t wanted = all_.open_.size() + all_.reserved_ + 1;
    if (all_.open_.capacity() < wanted) all_.open_.reserve(2 * wanted);
    ++all_.reserved_;
  }
  ~Reservation() {
    const std::lock_guard guard(all_.lock_);
    --all_.reserved_;
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

 private:
  PointToPoint& all_;
};

std::shared_ptr<Message> PointToPoint::start(std::shared_ptr<Driver> driver, const Args& args,
                                             CallRecord& record, std::shared_ptr<void> owner) {
  record.arm();
  Reservation reservation(*this);
  const auto message = make(std::move(driver), args, record.deadline, std::move(owner));
  message->transfer_ = post(args);
  record.on_started(0);
  track(reservation, message);
  return message;
}

transport::TransferRef PointToPoint::run_inline(const Args& args, CallRecord& record, bool idle) {
  if (args.op == Op::recv) return receive_inline(args, record, idle);
  auto transfer = group_.channel->try_send_inline(args.root, args.tag, args.inputs.front(),
                                                  header_of(args.dtype));
  record.on_started(0);
  record.completed_inline = transfer == nullptr;
  if (transfer != nullptr && transfer->done() && transfer->status().ok()) return nullptr;
  return transfer;
}

transport::TransferRef PointToPoint::receive_inline(const Args& args, CallRecord& record,
                                                    bool idle) {
  using transport::TryReceive;
  record.on_started(0);
  const int rank = group_.job_rank_of(args.root);
  const auto receive = [&] {
    return group_.channel->try_receive(args.root, args.tag, args.outputs.front(),
                                       header_of(args.dtype));
  };
  TryReceive received = idle ? receive() : TryReceive::needs_transfer;
  record.completed_inline = received == TryReceive::received;
  const bool arrived = received == TryReceive::not_yet && group_.fabric->spin_for_peer(rank);
  if (arrived) received = receive();
  if (received == TryReceive::received) return nullptr;
  auto transfer = post(args);
  if (arrived && !transfer->done()) group_.fabric->poll_peer(rank);
  if (idle && !transfer->done())
    group_.fabric->wait([&transfer] { return transfer->done(); },
                        std::min(record.deadline, group_.now() + tunables().round_trip));
  if (transfer->done() && transfer->status().ok()) return nullptr;
  return transfer;
}

transport::TransferRef PointToPoint::post(const Args& args) {
  const transport::Fingerprint header = header_of(args.dtype);
  return args.op == Op::recv
             ? group_.channel->receive(args.root, args.tag, args.outputs.front(), header)
             : group_.channel->send(args.root, args.tag, args.inputs.front(), header);
}

std::shared_ptr<Message> PointToPoint::follow(std::shared_ptr<Driver> driver, const Args& args,
                                              const transport::TransferRef& transfer,
                                              TimePoint deadline) {
  Reservation reservation(*this);
  const auto message = make(std::move(driver), args, deadline, nullptr);
  message->transfer_ = transfer;
  track(reservation, message);
  return message;
}

std::shared_ptr<Message> PointToPoint::make(std::shared_ptr<Driver> driver, const Args& args,
                                            TimePoint deadline, std::shared_ptr<void> owner) {
  const bool receives = args.op == Op::recv;
  const Message::MessageEnvelope envelope{receives, args.root, args.tag, message_bytes(args),
                                          args.dtype};
  return std::make_shared<Message>(group_, std::move(driver), envelope, deadline, std::move(owner));
}

/// Tracks an outstanding message.
void PointToPoint::track(Reservation&, const std::shared_ptr<Message>& message) {
  if (message->settle()) return;
  std::string cancelled;
  {
    const std::lock_guard guard(lock_);
    open_.push_back(message);  // room was reserved
    open_count_.store(open_.size());
    if (message->envelope_.receives) cancelled = cancelled_;
  }
  if (!cancelled.empty()) message->cancel(Status(Code::aborted, cancelled));
}

// Notices run inside `settle`, so it is called without the lock.
void PointToPoint::sweep() {
  if (empty()) return;
  std::vector<std::shared_ptr<Message>> over;
  {
    const std::unique_lock guard(lock_, std::try_to_lock);
    if (!guard.owns_lock()) return;
    for (std::size_t i = 0; i < open_.size();) {
      if (!open_[i]->published() && !open_[i]->transfer_->done()) {
        ++i;
        continue;
      }
      over.push_back(std::move(open_[i]));
      open_[i] = std::move(open_.back());
      open_.pop_back();
    }
    open_count_.store(open_.size());
  }
  for (const auto& message : over) message->settle();
}

TimePoint PointToPoint::next_deadline() {
  if (empty() || group_.channel->failed()) return TimePoint::max();
  const std::lock_guard guard(lock_);
  TimePoint earliest = TimePoint::max();
  for (const auto& message : open_) {
    const std::lock_guard message_guard(message->lock_);
    if (!message->cancel_requested_) earliest = std::min(earliest, message->deadline_);
  }
  return earliest;
}

void PointToPoint::check_deadlines(TimePoint now) {
  if (empty()) return;
  std::vector<std::shared_ptr<Message>> open;
  {
    const std::lock_guard guard(lock_);
    open = open_;
  }
  for (const auto& message : open) message->check_deadline(now);
}

bool PointToPoint::sends_done() {
  const std::lock_guard guard(lock_);
  return std::none_of(open_.begin(), open_.end(), [](const auto& message) {
    return !message->envelope_.receives && !message->transfer_->done();
  });
}

void PointToPoint::cancel_receives(const std::string& why) {
  std::vector<std::shared_ptr<Message>> open;
  {
    const std::lock_guard guard(lock_);
    open = open_;
    cancelled_ = why;
  }
  for (const auto& message : open) {
    if (message->envelope_.receives) message->cancel(Status(Code::aborted, why));
  }
}

}  // namespace muster::collective
