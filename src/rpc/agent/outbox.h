// SPDX-License-Identifier: BSD-3-Clause
/// Sends an agent's requests and replies as channel messages. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/transport/channel/channel.h"
#include "muster/rpc_options.h"
#include "muster/rpc_value.h"
#include "muster/status.h"
#include "rpc/agent/inbox.h"
#include "rpc/agent/worker_table.h"
#include "rpc/wire/message.h"
#include "rpc/wire/tensor_wire.h"

namespace muster::rpc {

/// Which large tensors are copied before sending: arguments read after the call returns, or results
/// with other owners.
enum class Copies : std::uint8_t { none, where_shared, all };

/// Device maps for outgoing tensors.
struct DeviceMaps {
  std::map<std::string, DeviceMap> ours;  ///< this worker's, by callee
  /// The other workers' maps to this worker, by caller; replies use their inverse.
  std::map<std::string, DeviceMap> callers;
};

class Outbox {
 public:
  /// `channel`, `workers` and `inbox` must outlive this object.
  Outbox(transport::Channel& channel, const WorkerTable& workers, DeviceMaps maps, Inbox& inbox)
      : channel_(channel),
        workers_(workers),
        maps_(std::move(maps)),
        inbox_(inbox),
        next_tags_(static_cast<std::size_t>(workers.size())) {}

  /// A message in transmission, as bytes, with the memory they are sent from.
  struct Outbound {
    int to = -1;
    std::uint64_t call = 0;
    bool is_call = false;  ///< a call of this worker; otherwise a reply, or a message without one
    std::string head;
    /// Empty unless the head is too long to be sent eagerly; `head` then announces it.
    std::string long_head;
    std::vector<int> apart;  ///< the parts sent separately: kPayloadPart, or the index of a tensor
    std::string payload;
    std::vector<TensorOut> tensors;
    std::shared_ptr<ValueDelivery> delivery;  ///< null: nothing depends on the outcome
    /// Tag of the long head; the parts follow under `first_tag` + 1, `first_tag` + 2, ...
    std::uint64_t first_tag = 0;
    std::vector<transport::TransferRef> transfers;

    bool sent() const;
  };
  Outbound prepare(int to, RpcMessage message, Copies copies);
  /// Sends what can be sent immediately and keeps the rest. If it throws, no part of the message is
  /// read any more and the peer will not handle it.
  void launch(Outbound message);
  /// Drops messages that have been sent. Returns calls whose own transfer failed although their
  /// worker is not lost.
  struct Refused {
    int to = -1;
    std::uint64_t call = 0;
    Status why;
  };
  std::vector<Refused> sweep();
  /// Cancels the unsent rest of an abandoned call; its memory is not read afterwards.
  void withdraw(std::uint64_t call);
  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }
  /// Cancels all that is not sent yet and frees its memory. The channel must still exist.
  void clear();

  /// As launch, for a message the peer will handle: a call, or a message without a reply.
  void launch_counted(Outbound message);
  /// Number of messages launched that way.
  std::uint64_t sent() const { return sent_.load(); }

 private:
  using OutboundRef = std::unique_ptr<Outbound>;
  struct NextTag {
    std::atomic<std::uint64_t> value{1};
  };

  DeviceMapping devices_towards(int to) const;
  bool cancel_rest(const Outbound& message);

  transport::Channel& channel_;
  const WorkerTable& workers_;
  const DeviceMaps maps_;
  Inbox& inbox_;
  std::vector<NextTag> next_tags_;     // by worker
  std::mutex mutex_;                   // guards messages_; nothing is sent or freed under it
  std::vector<OutboundRef> messages_;  // not sent entirely
  std::atomic<std::size_t> count_{0};  // size of messages_, written under mutex_
  std::atomic<std::uint64_t> sent_{0};
};

}  // namespace muster::rpc
