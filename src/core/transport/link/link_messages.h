/// The messages in flight on one link: those with a request, by their ids, and the payload being
/// read. Private to `transport/`; under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>

#include "core/transport/channel/envelope.h"

namespace muster::transport {

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

}  // namespace muster::transport
