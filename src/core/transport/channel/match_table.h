/// Finds messages and receives by (source, sequence, tag), first in first out. Nodes are the
/// caller's and are linked in place: a steady state allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster::transport {

struct MatchKey {
  int source = -1;  ///< job rank; -1 among receives from any
  std::uint64_t sequence = 0;
  std::uint64_t tag = 0;
  bool operator==(const MatchKey&) const = default;
};

/// `Node` has `MatchKey key` and `Node* next_match`.
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

}  // namespace muster::transport
