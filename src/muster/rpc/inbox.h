/// What comes to an agent: heads, and what follows them, until a message is whole. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/status.h"
#include "muster/rpc/call_table.h"
#include "muster/rpc/message.h"
#include "muster/rpc/value.h"
#include "muster/transport/channel.h"

namespace muster::rpc {

/// The tag of a message's head.
inline constexpr std::uint64_t kHeadTag = 0;
/// Nothing is ever sent under it: the receive that waits for it ends with the peer.
inline constexpr std::uint64_t kSentinelTag = ~std::uint64_t{0};

class InboxEvents {
 public:
  virtual void on_message(int from, const Head& head, Parcel parcel) = 0;
  /// `from` has ended, or sent what cannot be taken.
  virtual void on_loss(int from, const Status& why) = 0;

 protected:
  ~InboxEvents() = default;
};

class Inbox {
 public:
  /// `calls` says who is lost: messages of those are dropped.
  Inbox(transport::Channel& channel, int self, const CallTable& calls, InboxEvents& events);
  ~Inbox();

  /// From here on this worker learns of the peer's end.
  void contact(int peer);
  /// Takes what has come and hands it on, outside of the lock. Says whether there was anything.
  bool look();
  /// No message is half here.
  bool empty();

 private:
  struct Slot;
  struct Peer;
  struct Inbound;
  struct Found;
  struct News;

  void post_slot(Slot& slot);
  void post_slots();
  void collect(News& news);
  void receive_head(int from, ConstBytes bytes);
  void receive_apart(int from, const Head& head, ConstBytes bytes);
  void begin_apart(std::shared_ptr<Inbound> inbound);
  void finish_stage(const std::shared_ptr<Inbound>& inbound);

  transport::Channel& channel_;
  const int self_;
  const CallTable& calls_;
  InboxEvents& events_;
  std::vector<Peer> peers_;

  std::mutex mutex_;  // held while looking only
  std::vector<Slot> slots_;
  std::size_t unposted_ = 0;  // slots whose message was taken; posted again when there is time, or
                              // half of them are
  std::vector<std::unique_ptr<std::byte[]>> spares_;
  std::vector<int> contacted_;
  std::vector<std::shared_ptr<Inbound>> inbound_;
};

}  // namespace muster::rpc
