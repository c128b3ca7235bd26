/// What leaves an agent: requests and answers as messages of the channel. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/status.h"
#include "muster/rpc/inbox.h"
#include "muster/rpc/message.h"
#include "muster/rpc/options.h"
#include "muster/rpc/value.h"
#include "muster/rpc/worker_table.h"
#include "muster/transport/channel.h"

namespace muster::rpc {

/// Which large tensors are copied before they are sent: those of arguments that are read later, or
/// of results that others have too.
enum class Copies : std::uint8_t { none, where_shared, all };

/// Where tensors may go.
struct DeviceMaps {
  std::map<std::string, DeviceMap> ours;     ///< this worker's, by callee
  std::map<std::string, DeviceMap> callers;  ///< the others' to this worker, by caller: answers use
                                             ///< their inverse
};

/// A message until all of it is sent: what its bytes lie in.
struct OutboundMessage {
  int to = -1;
  std::uint64_t call = 0;
  bool is_call = false;  // ours; else an answer, or it wants none
  EncodedMessage encoded;
  std::string payload;
  std::vector<TensorOut> tensors;
  std::shared_ptr<Passage> passage;
  std::uint64_t first_tag = 0;
  std::vector<transport::TransferRef> transfers;

  bool sent() const;
};

class Outbox {
 public:
  /// `channel`, `workers` and `inbox` must outlive this.
  Outbox(transport::Channel& channel, const WorkerTable& workers, DeviceMaps maps, Inbox& inbox)
      : channel_(channel),
        workers_(workers),
        maps_(std::move(maps)),
        inbox_(inbox),
        next_tags_(static_cast<std::size_t>(workers.size())) {}

  OutboundMessage prepare(int to, Head head, Parcel parcel, Copies copies);
  /// Sends as much as goes at once and keeps the rest. Where it throws, nothing of the message is
  /// read any more, and nobody will handle it.
  void launch(OutboundMessage message);
  /// Drops what has been sent. Returns the calls that could not be: refused alone, while their
  /// worker is there.
  struct Refused {
    int to = -1;
    std::uint64_t call = 0;
    Status why;
  };
  std::vector<Refused> sweep();
  /// What is still to be sent of a call that was given up is not read any more afterwards.
  void withdraw(std::uint64_t call);
  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }
  void clear() { messages_.clear(); }

  /// The same for a call or a message without an answer: one that the other side handles.
  void launch_counted(OutboundMessage message);
  /// How many of these there were.
  std::uint64_t sent() const { return sent_.load(); }

 private:
  using Message = std::unique_ptr<OutboundMessage>;
  struct NextTag {
    std::atomic<std::uint64_t> value{1};
  };

  DeviceMapping devices_towards(int to) const;
  bool cancel_rest(const OutboundMessage& message);

  transport::Channel& channel_;
  const WorkerTable& workers_;
  const DeviceMaps maps_;
  Inbox& inbox_;
  std::vector<NextTag> next_tags_;  // by worker
  std::mutex mutex_;
  std::vector<Message> messages_;
  std::atomic<std::size_t> count_{0};
  std::atomic<std::uint64_t> sent_{0};
};

}  // namespace muster::rpc
