/// A posted send or receive as the fabric sees it. Private to `transport/`; everything beyond the
/// `Transfer` interface is guarded by the engine's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "core/transport/channel/channel.h"
#include "core/transport/channel/match_table.h"

namespace muster::transport {

struct TransferState final : Transfer, std::enable_shared_from_this<TransferState> {
  enum class Stage : std::uint8_t {
    posted,     ///< receive: nothing came yet
    arriving,   ///< receive: matched, the payload is coming
    blocked,    ///< send: no credit left
    queued,     ///< send: eager, in the link's queue
    requested,  ///< send: asked for, the receiver is not ready
    streaming,  ///< send: fragments are going out
    local,      ///< send to oneself that no receive has taken yet
    finished,
  };

  bool sends = false;
  bool exact = true;
  Stage stage = Stage::posted;
  std::uint32_t channel = 0;
  int rank = -1;  ///< job rank of the peer; -1: any
  int from = -1;  ///< receive: job rank whose message it has been given
  ConstBytes out;
  MutableBytes in;
  Fingerprint call;
  std::uint64_t order = 0;    ///< of posting, within the channel
  std::uint64_t message = 0;  ///< id on the link, of requested messages

  MatchKey key;
  TransferState* next_match = nullptr;

  // The channel's list of unfinished transfers; `self` keeps one alive while it is there.
  TransferState* before = nullptr;
  TransferState* after = nullptr;
  std::shared_ptr<TransferState> self;

  void set_peer(int member) { peer_ = member; }
  /// Fills in the result of a receive.
  void set_message(int member, std::size_t bytes, const Fingerprint& from) {
    source_ = member;
    bytes_ = bytes;
    fingerprint_ = from;
  }
  void complete(Status status) {
    stage = Stage::finished;
    status_ = std::move(status);
    done_.store(true, std::memory_order_release);
  }
};
using TransferStateRef = std::shared_ptr<TransferState>;

}  // namespace muster::transport
