// SPDX-License-Identifier: BSD-3-Clause
#include "backends/carried/messages.h"

#include <algorithm>
#include <cstring>

#include "backends/carried/call.h"
#include "core/base/keep_forever.h"
#include "core/collective/call.h"
#include "core/collective/op.h"
#include "core/tunables/tunables.h"

namespace muster::carried {

using collective::Args;
using collective::Op;
using CarriedMessage = Messages::CarriedMessage;

/// The first bytes of a message.
struct Messages::Header {
  std::uint64_t bytes = 0;
  std::uint32_t payload_tag = 0;  ///< of a large message
  std::uint8_t dtype = 0;
  std::uint8_t padding[3] = {};
};

namespace {

constexpr std::size_t kKeptBuffers = 16;  // limit: memory

std::string elements_text(std::uint64_t bytes, DType dtype) {
  return std::to_string(bytes / size_of(dtype)) + " elements of " + std::string(name_of(dtype));
}

}  // namespace

bool CarriedMessage::done() const {
  if (published()) return true;
  if (const auto driver = this->driver()) {
    driver->advance();
    driver->check_deadlines(driver->fabric()->clock().now());
  }
  return published();
}

Status CarriedMessage::wait(TimePoint deadline) {
  if (published()) return status();
  const auto driver = this->driver();
  if (driver != nullptr && !driver->drive_until([this] { return published(); }, deadline))
    return Status(Code::timed_out,
                  "the wait for a message timed out; the message itself is still outstanding");
  return status();
}

std::shared_ptr<collective::Driver> CarriedMessage::driver() const {
  auto& lock = const_cast<std::mutex&>(lock_);
  const std::lock_guard guard(lock);
  return driver_;
}

std::string CarriedMessage::text(const collective::GroupContext& group) const {
  const std::string peer =
      member_ == kAnySource ? "any rank" : "rank " + std::to_string(group.job_rank_of(member_));
  return (receives_ ? "recv of " : "send of ") + elements_text(bytes_, dtype_) +
         (receives_ ? " from " : " to ") + peer + " with tag " + std::to_string(tag_) + " in " +
         group.here();
}

Messages::Messages(const collective::GroupContext& group, CallLibrary& library, Comm& comm,
                   CarriedTags tags, void (*on_abandoned)())
    : group_(group), library_(library), comm_(comm), tags_(tags), on_abandoned_(on_abandoned) {}

/// Nothing may be open any more, except receives that were cancelled when the group closed.
Messages::~Messages() {
  for (const auto& message : open_) {
    on_abandoned_();
    keep_forever(message);
  }
}

Messages::Buffer Messages::take_buffer() {
  if (buffers_.empty())
    return std::make_unique_for_overwrite<std::byte[]>(sizeof(Header) + fixed::kSmallMessage);
  Buffer buffer = std::move(buffers_.back());
  buffers_.pop_back();
  return buffer;
}

Status Messages::mpi_error(const CarriedMessage& message, int code) {
  return failed(library_, message.receives_ ? "MPI_Irecv" : "MPI_Isend", code);
}

std::shared_ptr<CarriedMessage> Messages::start(std::shared_ptr<collective::Driver> driver,
                                                const Args& args, TimePoint deadline,
                                                std::shared_ptr<void> owner) {
  auto message = std::make_shared<CarriedMessage>(std::move(driver));
  message->receives_ = args.op == Op::recv;
  message->member_ = args.root == transport::kAnyMember ? kAnySource : args.root;
  message->tag_ = args.tag;
  message->dtype_ = args.dtype;
  message->owner_ = std::move(owner);
  message->created_at_ = group_.now();
  message->deadline_ = deadline;
  if (message->receives_) {
    message->data_ = args.outputs[0].data();
    message->bytes_ = args.outputs[0].size();
  } else {
    message->data_ = const_cast<std::byte*>(args.inputs[0].data());
    message->bytes_ = args.inputs[0].size();
  }
  {
    const std::lock_guard guard(lock_);
    message->buffer_ = take_buffer();
    open_.push_back(message);
    open_count_.store(open_.size());
    if (message->receives_) {
      post_receive(*message);
    } else {
      post_send(*message);
    }
  }
  sweep();
  return message;
}

void Messages::post_send(CarriedMessage& message) {
  Header header{.bytes = message.bytes_, .dtype = static_cast<std::uint8_t>(message.dtype_)};
  const bool small = message.bytes_ <= fixed::kSmallMessage;
  if (!small) header.payload_tag = static_cast<std::uint32_t>(tags_.payload(large_sent_++));
  std::byte* const buffer = message.buffer_.get();
  std::memcpy(buffer, &header, sizeof header);
  if (small && message.bytes_ > 0)
    std::memcpy(buffer + sizeof header, message.data_, message.bytes_);
  const auto length = static_cast<Count>(sizeof header + (small ? message.bytes_ : 0));
  int code =
      comm_.send(buffer, length, message.member_, static_cast<int>(message.tag_), message.header_);
  if (code == 0 && !small)
    code = comm_.send(message.data_, static_cast<Count>(message.bytes_), message.member_,
                      static_cast<int>(header.payload_tag), message.payload_);
  if (code != 0) message.wrong_ = mpi_error(message, code);
}

void Messages::post_receive(CarriedMessage& message) {
  if (!cancelled_.empty()) {
    message.wrong_ = Status(Code::aborted, cancelled_);
    return;
  }
  const int code = comm_.receive(message.buffer_.get(), sizeof(Header) + fixed::kSmallMessage,
                                 message.member_, static_cast<int>(message.tag_), message.header_);
  if (code != 0) message.wrong_ = mpi_error(message, code);
}

/// Whether the message has ended; then `outcome_` holds how. Under the lock.
bool Messages::step(CarriedMessage& message) {
  bool done = false;
  if (message.header_.active) {
    CarriedArrival* const arrival = message.receives_ ? &message.arrival_ : nullptr;
    if (const int code = library_.test(message.header_, done, arrival); code != 0)
      message.wrong_ = mpi_error(message, code);
    if (message.header_.active) return false;
  }
  if (message.receives_ && message.wrong_.ok() && !message.has_header_) {
    if (message.arrival_.cancelled) {
      message.wrong_ = message.cancel_reason_;
    } else if (!read_header(message)) {
      return false;
    }
  }
  if (message.payload_.active) {
    if (const int code = library_.test(message.payload_, done, nullptr); code != 0)
      message.wrong_ = mpi_error(message, code);
    if (message.payload_.active) return false;
  }
  message.outcome_ =
      message.wrong_.ok() ? Status() : message.wrong_.with_context(message.text(group_));
  return true;
}

/// The header has come. Whether the whole message has come with it, or it needs no more.
bool Messages::read_header(CarriedMessage& message) {
  message.has_header_ = true;
  Header header;
  std::memcpy(&header, message.buffer_.get(), sizeof header);
  const auto dtype = static_cast<DType>(std::min<int>(header.dtype, kDTypes - 1));
  const bool fits = header.bytes == message.bytes_ && dtype == message.dtype_;
  if (!fits) {
    message.wrong_ =
        Status(Code::mismatch,
               "rank " + std::to_string(group_.job_rank_of(message.arrival_.source)) + " sent " +
                   elements_text(header.bytes, dtype) + ", and the receive is for " +
                   elements_text(message.bytes_, message.dtype_) +
                   "; both must name the same size and dtype",
               {group_.job_rank_of(message.arrival_.source)});
  }
  if (header.bytes <= fixed::kSmallMessage) {
    if (fits && message.bytes_ > 0)
      std::memcpy(message.data_, message.buffer_.get() + sizeof header, message.bytes_);
    return true;
  }
  std::byte* into = message.data_;
  if (!fits) {
    message.drained_ = std::make_unique_for_overwrite<std::byte[]>(header.bytes);
    into = message.drained_.get();
  }
  message.payload_begun_ = true;
  const int code = comm_.receive(into, static_cast<Count>(header.bytes), message.arrival_.source,
                                 static_cast<int>(header.payload_tag), message.payload_);
  if (code != 0) message.wrong_ = mpi_error(message, code);
  return code != 0;
}

/// Under the lock; its notices run later, without it.
void Messages::end(CarriedMessage& message, Status status) {
  message.outcome_ = std::move(status);
  if (message.buffer_ != nullptr && buffers_.size() < kKeptBuffers)
    buffers_.push_back(std::move(message.buffer_));
}

void Messages::sweep() {
  if (empty()) return;
  std::vector<std::shared_ptr<CarriedMessage>> ended;
  {
    const std::unique_lock guard(lock_, std::try_to_lock);
    if (!guard.owns_lock()) return;
    if (group_.channel->failed()) fail_open();
    for (std::size_t i = 0; i < open_.size();) {
      if (!step(*open_[i])) {
        ++i;
        continue;
      }
      end(*open_[i], std::move(open_[i]->outcome_));
      ended.push_back(std::move(open_[i]));
      open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (auto& message : ended_) ended.push_back(std::move(message));
    ended_.clear();
    open_count_.store(open_.size());
  }
  for (const auto& message : ended) {
    std::shared_ptr<collective::Driver> driver;
    std::shared_ptr<void> owner;
    {
      const std::lock_guard guard(message->lock_);
      driver = std::move(message->driver_);
      owner = std::move(message->owner_);
    }
    const auto notices = message->publish(message->outcome_);
    for (const auto& notice : notices) notice(message->status());
  }
}

/// The group has failed: all messages end now. Messages that MPI still uses are kept for ever, with
/// their owners. Under the lock.
void Messages::fail_open() {
  const Status failure = group_.channel->failure();
  for (const auto& message : open_) {
    if (step(*message)) {
      end(*message, std::move(message->outcome_));
    } else {
      if (message->receives_ && message->header_.active) library_.cancel(message->header_);
      on_abandoned_();
      abandoned_.store(true);
      keep_forever(message);
      keep_forever(message->owner_);
      message->outcome_ = failure.with_context(message->text(group_));
    }
    ended_.push_back(message);
  }
  open_.clear();
}

TimePoint Messages::next_deadline() {
  if (empty() || group_.channel->failed()) return TimePoint::max();
  const std::lock_guard guard(lock_);
  TimePoint earliest = TimePoint::max();
  for (const auto& message : open_)
    if (message->cancel_reason_.ok()) earliest = std::min(earliest, message->deadline_);
  return earliest;
}

void Messages::check_deadlines(TimePoint now) {
  if (empty()) return;
  Status poison;
  {
    const std::unique_lock guard(lock_, std::try_to_lock);
    if (!guard.owns_lock()) return;
    for (const auto& message : open_) {
      if (now < message->deadline_ || !message->cancel_reason_.ok() || group_.channel->failed())
        continue;
      std::vector<int> ranks;
      if (message->member_ != kAnySource) ranks.push_back(group_.job_rank_of(message->member_));
      const std::string late =
          "it did not complete within " + describe(now - message->created_at_) +
          (group_.peer_traces && !ranks.empty() ? group_.peer_traces->tell(group_.name, ranks)
                                                : std::string());
      const bool can_cancel = message->receives_ && !message->payload_begun_;
      message->cancel_reason_ =
          Status(Code::timed_out,
                 late + (message->receives_
                             ? "; see whether the sender has sent with this tag"
                             : "; see whether the receiver has posted a receive with this tag"),
                 ranks);
      if (can_cancel && library_.cancel(message->header_) == 0) continue;
      poison = Status(Code::timed_out,
                      message->text(group_) + ": " + message->cancel_reason_.message() +
                          ". MPI cannot cancel it, so the group cannot be used any more; destroy "
                          "it and make another",
                      ranks);
      break;
    }
  }
  if (!poison.ok()) group_.channel->fail(poison);
  sweep();
}

bool Messages::sends_done() {
  const std::lock_guard guard(lock_);
  return std::none_of(open_.begin(), open_.end(),
                      [](const auto& message) { return !message->receives_; });
}

void Messages::cancel_receives(const std::string& why) {
  {
    const std::lock_guard guard(lock_);
    cancelled_ = why;
    for (const auto& message : open_) {
      if (!message->receives_ || !message->header_.active || !message->cancel_reason_.ok())
        continue;
      message->cancel_reason_ = Status(Code::aborted, why);
      library_.cancel(message->header_);
    }
  }
  sweep();
}

}  // namespace muster::carried
