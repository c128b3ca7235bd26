// SPDX-License-Identifier: BSD-3-Clause
/// One peer of the job: the stream to it, its protocol and the messages under way. Private to
/// `transport/`; under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/time/clock.h"
#include "core/transport/byte_stream.h"
#include "core/transport/channel/messages.h"
#include "core/transport/engine/engine_context.h"
#include "core/transport/link/link_protocol.h"
#include "muster/clock.h"

namespace muster::transport {

/// The messages in flight on one link: those with a request, by their ids, and the payload being
/// read.
class LinkMessages {
 public:
  /// A requested message of the peer that has been matched with a receive.
  struct Incoming {
    TransferStateRef receive;  // null: its payload is dropped
    FrameHeader header;        // of the request
    std::size_t bytes = 0;
    std::size_t got = 0;
  };

  // Outgoing messages, by the ids that this side assigned.
  std::uint64_t add_request(const TransferStateRef& send) {
    requests_.emplace(next_id_, send);
    return next_id_++;
  }
  bool was_announced(std::uint64_t id) const { return id < next_id_; }
  /// Null once the message was cancelled or sent.
  TransferStateRef request(std::uint64_t id) const {
    const auto found = requests_.find(id);
    return found == requests_.end() ? nullptr : found->second;
  }
  void forget_request(std::uint64_t id) { requests_.erase(id); }

  // Incoming messages, by the ids that the peer assigned.
  void expect(const FrameHeader& request, const TransferStateRef& receive) {
    incoming_.emplace(request.message,
                      Incoming{receive, request, static_cast<std::size_t>(request.amount), 0});
  }
  Incoming* incoming(std::uint64_t id) {
    const auto found = incoming_.find(id);
    return found == incoming_.end() ? nullptr : &found->second;
  }
  Incoming take_incoming(std::uint64_t id) { return std::move(incoming_.extract(id).mapped()); }

  /// Drops what still arrives for `receive`. True if that is the payload being read.
  bool forget_receive(const TransferState& receive) {
    for (auto& [id, message] : incoming_) {
      if (message.receive.get() == &receive) message.receive = nullptr;
    }
    if (arrival.receive.get() != &receive) return false;
    arrival.receive = nullptr;
    return true;
  }

  bool empty() const { return requests_.empty() && incoming_.empty(); }

  Arrival arrival;  ///< where the payload that is being read belongs

 private:
  std::unordered_map<std::uint64_t, TransferStateRef> requests_;
  std::unordered_map<std::uint64_t, Incoming> incoming_;
  std::uint64_t next_id_ = 1;
};

struct LinkFlags {
  bool connecting = false;       ///< a stream was asked for
  bool in_service = false;       ///< its protocol stands on the stack
  bool stuck = false;            ///< the stream took less than it was offered
  bool polled_for_room = false;  ///< epoll says when the stream takes more
  bool dirty = false;            ///< in the writer's list of links with something to write
  bool batched = false;          ///< in the writer's list of links with batched messages
};

struct LinkTimes {
  TimePoint heard{};         ///< bytes
  TimePoint last_message{};  ///< a message or a part of one
  /// The oldest ping without an answer, or the latest beat that found it still on its way; zero:
  /// none.
  TimePoint asked{};
};

/// How far the oldest ping without an answer has come.
struct PingProgress {
  bool arrived = false;                       ///< at the peer's kernel
  std::optional<std::uint64_t> acknowledged;  ///< bytes of all connections, at the latest look
  std::vector<std::uint64_t> ends;  ///< of the ping, on each connection; empty: not written yet
};

/// The state of a peer's silence.
struct PeerSilence {
  bool suspected = false;  ///< the log and the trace have been told
  int stops = 0;           ///< consecutive looks at which the kernel called its process stopped
  OwnPauses pauses;        ///< that have moved `LinkTimes::asked`
};

/// The state of the orderly close.
struct LinkClose {
  bool received = false;      ///< the peer's close frame
  bool unclosed = false;      ///< the peer had not closed its groups
  bool acknowledged = false;  ///< the peer has answered ours
};

class Link final {
 public:
  /// Makes what the link's protocol reports to.
  using MakeEvents = std::function<std::unique_ptr<LinkEvents>(Link&)>;

  Link(int peer, EngineContext& engine, const MakeEvents& make_events)
      : engine_(engine), peer_(peer), events_(make_events(*this)), protocol(*events_) {}

  int peer() const { return peer_; }
  bool up() const { return stream != nullptr; }
  bool has_descriptor() const { return up() && stream->descriptor() >= 0; }
  /// Whether its stream is established or being established.
  bool up_or_connecting() const { return up() || flags.connecting; }
  bool busy() const { return !messages.empty() || has_output(); }
  /// Whether something waits to be written, in the protocol or in the stream.
  bool has_output() const { return protocol.out.has_output() || (up() && stream->has_unsent()); }

  /// Reads and writes without blocking, up to a limit per pass. True if anything moved.
  bool read_some();
  bool write_some();
  /// Writes a frame directly to the stream if nothing else waits to be written. Returns how many
  /// bytes were written: none, a part (the rest goes to the protocol, `push_begun`) or all.
  std::size_t write_inline(const FrameHeader& header, ConstBytes payload);
  /// Receives the next message of the stream into `data` if its header equals `expected` and all of
  /// it has arrived; otherwise changes nothing.
  TryReceive try_receive(const FrameHeader& expected, MutableBytes data);
  /// Whether the oldest ping without an answer is still on its way behind other bytes: it has not
  /// reached the peer's kernel, and that has acknowledged some since the last look.
  bool ping_is_moving();
  /// Drops what still arrives for `receive`.
  void abandon(const TransferState& receive) {
    if (messages.forget_receive(receive)) protocol.in.drain_payload();
  }

 private:
  bool header_alone() const;

  EngineContext& engine_;
  const int peer_;
  const std::unique_ptr<LinkEvents> events_;

 public:
  LinkProtocol protocol;
  std::unique_ptr<ByteStream> stream;
  LinkMessages messages;
  LinkFlags flags;
  LinkTimes times;
  PingProgress ping;
  PeerSilence silence;
  LinkClose close;
  Status ended;          ///< why the stream is no more
  Status write_failure;  ///< writing has failed; remaining input is read first
};

}  // namespace muster::transport
