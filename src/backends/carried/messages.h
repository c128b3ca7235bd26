// SPDX-License-Identifier: BSD-3-Clause
/// Messages between the members of a group, over MPI.
///
/// A message begins with a header, so that the receiver can name a message of another size or
/// dtype. Up to `fixed::kSmallMessage` bytes travel with the header; larger ones follow it, under a
/// tag of their own, straight into the receiver's memory. The user's tag is MPI's tag, so MPI
/// matches messages. Tags that MPI cannot carry (`CarriedTags`) are for the group's channel.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/carried/library.h"
#include "backends/carried/tags.h"
#include "core/collective/completion.h"
#include "core/collective/queue/driver.h"

namespace muster::carried {

class Messages {
 public:
  class CarriedMessage;

  /// `on_abandoned`: called once a message may go on in the library that nobody can end.
  Messages(const collective::GroupContext& group, CallLibrary& library, Comm& comm,
           CarriedTags tags, void (*on_abandoned)());
  ~Messages();
  Messages(const Messages&) = delete;

  /// Posts a valid message; holds `owner` until it has ended.
  std::shared_ptr<CarriedMessage> start(std::shared_ptr<collective::Driver> driver,
                                        const collective::Args& args, TimePoint deadline,
                                        std::shared_ptr<void> owner);

  /// Advances all messages. Never blocks.
  void sweep();
  bool empty() const { return open_count_.load() == 0; }
  TimePoint next_deadline();
  /// Ends messages that are past their deadline. A receive is cancelled. MPI cannot cancel a send,
  /// nor a receive that has begun: that fails the group.
  void check_deadlines(TimePoint now);
  bool sends_done();
  /// Cancels every receive without a matching message, and all that are posted later.
  void cancel_receives(const std::string& why);
  /// Whether MPI may still use memory of a message that has failed.
  bool has_abandoned() const { return abandoned_.load(); }

 private:
  struct Header;
  using Buffer = std::unique_ptr<std::byte[]>;

  Buffer take_buffer();
  void post_send(CarriedMessage& message);
  void post_receive(CarriedMessage& message);
  bool step(CarriedMessage& message);
  bool read_header(CarriedMessage& message);
  void end(CarriedMessage& message, Status status);
  void fail_open();
  Status mpi_error(const CarriedMessage& message, int code);

  const collective::GroupContext& group_;
  CallLibrary& library_;
  Comm& comm_;
  const CarriedTags tags_;
  void (*const on_abandoned_)();
  // Guards the following and the open messages, but for their `driver_` and `owner_`. Notices run
  // after it was released, under no lock.
  std::mutex lock_;
  std::vector<std::shared_ptr<CarriedMessage>> open_;
  std::atomic<std::size_t> open_count_{0};              // size of open_, written under lock_
  std::vector<std::shared_ptr<CarriedMessage>> ended_;  // whose notices are due
  std::vector<Buffer> buffers_;
  std::uint64_t large_sent_ = 0;
  std::string cancelled_;  // why receives are cancelled; empty: they are not
  std::atomic<bool> abandoned_{false};
};

class Messages::CarriedMessage final : public collective::Completion {
 public:
  explicit CarriedMessage(std::shared_ptr<collective::Driver> driver)
      : driver_(std::move(driver)) {}

  bool done() const override;
  Status wait(TimePoint deadline) override;
  int source() const override {
    return published() && receives_ && status().ok() ? arrival_.source : -1;
  }
  std::size_t bytes() const override { return published() && status().ok() ? bytes_ : 0; }

 private:
  friend class Messages;
  std::shared_ptr<collective::Driver> driver() const;
  std::string text(const collective::GroupContext& group) const;

  std::shared_ptr<collective::Driver> driver_;  // until it has ended; under Completion's lock
  bool receives_ = false;
  int member_ = -1;
  std::uint64_t tag_ = 0;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  DType dtype_ = DType::uint8;
  std::shared_ptr<void> owner_;
  TimePoint created_at_, deadline_;
  Buffer buffer_;  // header and small payload
  CarriedRequest header_, payload_;
  CarriedArrival arrival_;
  bool has_header_ = false;
  bool payload_begun_ = false;  // of a receive
  Buffer drained_;              // a payload that does not fit
  Status wrong_;                // why the message ends badly once it has been drained
  Status cancel_reason_;        // a cancelled receive; it still has to end
  Status outcome_;
};

}  // namespace muster::carried
