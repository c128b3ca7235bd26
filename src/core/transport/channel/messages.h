// SPDX-License-Identifier: BSD-3-Clause
/// The messages of a channel that are under way: posted transfers, those that have arrived, and how
/// they find each other. Private to `transport/`; under the engine's lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/transport/channel/channel.h"
#include "core/transport/link/link_protocol.h"

namespace muster::transport {

struct MatchKey {
  int source = -1;  ///< job rank; -1 among receives from any
  std::uint64_t sequence = 0;
  std::uint64_t tag = 0;
  bool operator==(const MatchKey&) const = default;
};

/// Finds messages and receives by (source, sequence, tag), first in first out. Nodes are the
/// caller's and are linked in place: a steady state allocates nothing. `Node` has `MatchKey key`
/// and `Node* next_match`.
template <class Node>
class MatchTable {
 public:
  bool empty() const { return count_ == 0; }
  std::size_t size() const { return count_; }

  void add(Node* node) {
    if (count_ >= 2 * buckets_.size()) grow();
    append(buckets_[slot(node->key)], node);
    ++count_;
  }
  /// The first that was added under `key`, or null; stays in the table.
  Node* find(const MatchKey& key) const {
    if (count_ == 0) return nullptr;
    for (Node* node = buckets_[slot(key)].head; node != nullptr; node = node->next_match) {
      if (node->key == key) return node;
    }
    return nullptr;
  }
  /// False where it is not in the table.
  bool remove(Node* node) {
    if (count_ == 0) return false;
    HashBucket& bucket = buckets_[slot(node->key)];
    Node* before = nullptr;
    for (Node* at = bucket.head; at != nullptr; before = at, at = at->next_match) {
      if (at != node) continue;
      (before == nullptr ? bucket.head : before->next_match) = node->next_match;
      if (bucket.tail == node) bucket.tail = before;
      node->next_match = nullptr;
      --count_;
      return true;
    }
    return false;
  }
  /// The first node for which `wanted` holds, in no particular order; or null.
  template <class Predicate>
  Node* find_if(const Predicate& wanted) const {
    for (const HashBucket& bucket : buckets_) {
      for (Node* node = bucket.head; node != nullptr; node = node->next_match) {
        if (wanted(*node)) return node;
      }
    }
    return nullptr;
  }

 private:
  struct HashBucket {
    Node* head = nullptr;
    Node* tail = nullptr;
  };

  std::size_t slot(const MatchKey& key) const {
    std::uint64_t hash = (key.sequence * 0x9e3779b97f4a7c15ull) ^
                         (key.tag * 0xc2b2ae3d27d4eb4full) ^ static_cast<std::uint32_t>(key.source);
    hash ^= hash >> 32;
    hash *= 0xd6e8feb86659fd93ull;
    hash ^= hash >> 32;
    return static_cast<std::size_t>(hash) & (buckets_.size() - 1);
  }
  static void append(HashBucket& bucket, Node* node) {
    node->next_match = nullptr;
    (bucket.tail == nullptr ? bucket.head : bucket.tail->next_match) = node;
    bucket.tail = node;
  }
  void grow() {
    std::vector<HashBucket> old(buckets_.empty() ? 8 : 2 * buckets_.size());
    old.swap(buckets_);
    for (HashBucket& bucket : old) {
      for (Node* node = bucket.head; node != nullptr;) {
        Node* next = node->next_match;
        append(buckets_[slot(node->key)], node);
        node = next;
      }
    }
  }

  std::vector<HashBucket> buckets_;  // a power of two
  std::size_t count_ = 0;
};

/// A posted send or receive as the fabric sees it. Everything beyond the `Transfer` interface is
/// guarded by the engine's lock.
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

/// A channel's unfinished transfers, linked through the transfers themselves.
class TransferList {
 public:
  /// Keeps the transfer alive until `remove`.
  void add(const TransferStateRef& transfer) {
    transfer->self = transfer;
    transfer->after = first_;
    if (first_ != nullptr) first_->before = transfer.get();
    first_ = transfer.get();
  }
  TransferStateRef remove(TransferState& transfer) {
    (transfer.before == nullptr ? first_ : transfer.before->after) = transfer.after;
    if (transfer.after != nullptr) transfer.after->before = transfer.before;
    transfer.before = transfer.after = nullptr;
    return std::move(transfer.self);
  }

  /// All of them, the oldest first.
  std::vector<TransferStateRef> all() const {
    std::vector<TransferStateRef> found;
    for (TransferState* each = first_; each != nullptr; each = each->after)
      found.push_back(each->self);
    std::reverse(found.begin(), found.end());
    return found;
  }
  /// Whether one waits for `rank` or wants to reach it.
  bool needs(int rank) const {
    for (const TransferState* each = first_; each != nullptr; each = each->after) {
      if (each->rank == rank || each->from == rank) return true;
    }
    return false;
  }

 private:
  TransferState* first_ = nullptr;
};

/// An unmatched message.
struct Envelope {
  MatchKey key;
  Envelope* next_match = nullptr;
  FrameHeader header;
  std::unique_ptr<std::byte[]> payload;  ///< of an eager message
  TransferStateRef local;                ///< a send to oneself, not copied
  std::uint64_t arrival = 0;             ///< order of arrival within the channel
};

/// Destination of the payload that a link is reading: a receive, an envelope, or none (it is
/// dropped).
struct Arrival {
  TransferStateRef receive;
  std::unique_ptr<Envelope> envelope;
  /// The message counts against its sender's credit until it is taken or dropped.
  bool holds_credit = false;
};

}  // namespace muster::transport
