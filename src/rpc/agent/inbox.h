// SPDX-License-Identifier: BSD-3-Clause
/// Receives an agent's messages, and recycles the memory of large received tensors.
#pragma once

#include <c10/core/Allocator.h>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/base/bytes.h"
#include "core/transport/channel/channel.h"
#include "muster/rpc_value.h"
#include "muster/status.h"
#include "rpc/agent/call_table.h"
#include "rpc/wire/message.h"
#include "rpc/wire/tensor_wire.h"

namespace muster::rpc {

// The memory of large received tensors. Fresh memory of that size costs more than the copy into it,
// because the kernel maps and clears every page on first use. A few of the most recent blocks are
// kept per process; the kernel may reclaim their pages under memory pressure. Thread-safe.

/// Allocates `bytes` from torch's allocator. A large block is kept for reuse when it is freed.
c10::DataPtr allocate_or_reuse(std::size_t bytes);
/// Frees the kept blocks.
void drop_spare_memory();

// Receives an agent's messages: heads and their separate parts, until a message is complete.
// Thread-safe.

/// The tag of a message's head.
inline constexpr std::uint64_t kHeadTag = 0;
/// Never sent: a receive posted with this tag ends when the peer does.
inline constexpr std::uint64_t kSentinelTag = ~std::uint64_t{0};

class InboxEvents {
 public:
  virtual void on_message(int from, RpcMessage message) = 0;
  /// `from` has ended or sent an invalid message.
  virtual void on_loss(int from, const Status& why) = 0;

 protected:
  ~InboxEvents() = default;
};

class Inbox {
 public:
  /// `calls` knows the lost workers; messages from them are dropped.
  Inbox(transport::Channel& channel, int self, const CallTable& calls, InboxEvents& events);
  ~Inbox();

  /// Starts monitoring the peer's end.
  void contact(int peer);
  /// Receives available messages and delivers them, outside the lock. Returns whether there were
  /// any.
  bool look();
  /// No message is partially received.
  bool empty();

 private:
  struct InboxSlot;
  struct InboxPeer;
  struct Inbound;
  struct Found;
  struct InboxNews;

  void post_slot(InboxSlot& slot);
  void post_slots();
  void collect(InboxNews& news);
  void receive_head(int from, ConstBytes bytes);
  void receive_apart(int from, const MessageHead& head, ConstBytes bytes);
  void begin_apart(std::shared_ptr<Inbound> inbound);
  void finish_stage(const std::shared_ptr<Inbound>& inbound);

  transport::Channel& channel_;
  const int self_;
  const CallTable& calls_;
  InboxEvents& events_;
  std::vector<InboxPeer> peers_;

  std::mutex mutex_;  // guards the following and the sentinels; events are delivered without it
  std::vector<InboxSlot> slots_;
  // Slots whose message was consumed; reposted when there is time, or when half of them are.
  std::size_t unposted_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> spares_;
  std::vector<int> contacted_;
  std::vector<std::shared_ptr<Inbound>> inbound_;
};

}  // namespace muster::rpc
