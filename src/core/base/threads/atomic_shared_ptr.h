/// An atomic shared pointer for objects that are read far more often than they are replaced.
///
/// A reader acquires the object by one atomic addition and releases it by another: it takes no lock
/// and leaves the object's own count alone. Pointer and local reference count share one word. A
/// writer that swaps the pointer transfers the count to the old node, which is freed by its last
/// holder (split reference counting). The first thread that reads becomes the owner: it only writes
/// a note of what it holds, and a writer sends a barrier (`host_barrier.h`) and reads that note.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "core/base/threads/biased_lock.h"

namespace muster {

/// Thread-safe, except for the destructor.
template <class T>
class AtomicSharedPtr {
  struct CountedObject {
    std::shared_ptr<T> object;
    std::atomic<std::int64_t> deferred{0};  // holders since it was replaced; below 0 if
                                            // they release before the writer adds them
  };

 public:
  /// Keeps the object that was current when this was made. Also empty when the word cannot count
  /// one more holder.
  class SharedHold {
   public:
    SharedHold() = default;
    explicit SharedHold(const AtomicSharedPtr& slot) : slot_(&slot) {
      if (slot.is_owner() && (node_ = slot.acquire_noted()) != nullptr) {
        noted_ = true;
        return;
      }
      node_ = slot.acquire_counted();
    }
    SharedHold(const SharedHold&) = delete;
    SharedHold& operator=(const SharedHold&) = delete;
    ~SharedHold() {
      if (noted_) {
        slot_->clear_note(node_);
      } else if (node_ != nullptr) {
        slot_->release(node_);
      }
    }

    T* get() const { return node_ == nullptr ? nullptr : node_->object.get(); }

   private:
    const AtomicSharedPtr* slot_ = nullptr;
    CountedObject* node_ = nullptr;
    bool noted_ = false;  // held by the owner's note
  };

  AtomicSharedPtr() = default;
  AtomicSharedPtr(const AtomicSharedPtr&) = delete;
  AtomicSharedPtr& operator=(const AtomicSharedPtr&) = delete;
  ~AtomicSharedPtr() { set(nullptr); }

  void set(std::shared_ptr<T> object) {
    std::uint64_t word = 0;
    if (object != nullptr) {
      auto node = std::make_unique<CountedObject>();
      node->object = std::move(object);
      word = reinterpret_cast<std::uintptr_t>(node.get()) << kHolderBits;
      // An address that does not fit beside the count is not stored: readers find nothing.
      node_in(word) == node.get() ? static_cast<void>(node.release()) : static_cast<void>(word = 0);
    }
    const std::lock_guard one_at_a_time(changing_);
    const std::uint64_t before = word_.exchange(word, std::memory_order_acq_rel);
    if (before != 0)
      settle(node_in(before),
             static_cast<std::int64_t>(before & kHolders) + owner_holds(node_in(before)));
  }

 private:
  static constexpr int kHolderBits = 16;
  static constexpr std::uint64_t kHolders = (std::uint64_t{1} << kHolderBits) - 1;
  static CountedObject* node_in(std::uint64_t word) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): a word holds an address beside the count
    return reinterpret_cast<CountedObject*>(word >> kHolderBits);
  }

  static void settle(CountedObject* node, std::int64_t change) {
    if (node->deferred.fetch_add(change, std::memory_order_acq_rel) + change == 0) delete node;
  }

  bool is_owner() const {
    const std::uintptr_t known = owner_.load(std::memory_order_relaxed);
    return known == biased_lock_detail::this_thread() || (known == 0 && become_owner());
  }
  [[gnu::noinline, gnu::cold]] bool become_owner() const {
    std::uintptr_t no_owner = 0;
    if (!takes_host_barriers() ||
        !owner_.compare_exchange_strong(no_owner, biased_lock_detail::this_thread(),
                                        std::memory_order_relaxed))
      return false;
    std::atomic_thread_fence(
        std::memory_order_seq_cst);  // a writer that saw no owner swapped before this reads
    return true;
  }
  [[gnu::noinline]] CountedObject* acquire_counted() const {
    std::uint64_t seen = word_.load(std::memory_order_relaxed);
    while (seen != 0 && (seen & kHolders) != kHolders) {
      if (word_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire,
                                      std::memory_order_relaxed))
        return node_in(seen);
    }
    return nullptr;
  }
  /// The owner alone: acquires by its note. Null if it must count instead: it holds a node already,
  /// or the node has just been replaced.
  CountedObject* acquire_noted() const {
    if (noted_.load(std::memory_order_relaxed) != nullptr) return nullptr;
    CountedObject* const node = node_in(word_.load(std::memory_order_relaxed));
    if (node == nullptr) return nullptr;
    noted_.store(node, std::memory_order_release);
    meet_host_barrier();  // either the writer sees the note, or this sees the new pointer
    if (node_in(word_.load(std::memory_order_acquire)) == node) [[likely]]
      return node;
    clear_note(node);
    return nullptr;
  }
  void clear_note(CountedObject* node) const {
    noted_.store(nullptr, std::memory_order_release);
    meet_host_barrier();
    if (replaced_.load(std::memory_order_relaxed) == node) [[unlikely]]
      release_replaced(node);
  }
  [[gnu::noinline, gnu::cold]] void release_replaced(CountedObject* node) const {
    CountedObject* expected = node;
    if (replaced_.compare_exchange_strong(expected, nullptr, std::memory_order_acq_rel))
      settle(node, -1);
  }
  /// 1 if the owner holds `node`, which has been replaced, and will settle it on release; else 0.
  std::int64_t owner_holds(CountedObject* node) const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (owner_.load(std::memory_order_relaxed) == 0) return 0;
    send_host_barrier();
    if (noted_.load(std::memory_order_acquire) != node) return 0;
    // The owner holds one node at most.
    replaced_.store(node, std::memory_order_release);
    send_host_barrier();
    if (noted_.load(std::memory_order_acquire) == node) return 1;
    // The owner has released meanwhile, and may have settled the node already.
    CountedObject* expected = node;
    return replaced_.compare_exchange_strong(expected, nullptr, std::memory_order_acq_rel) ? 0 : 1;
  }

  // A held node is not freed, so no other node can have its address.
  [[gnu::noinline]] void release(CountedObject* node) const {
    std::uint64_t seen = word_.load(std::memory_order_relaxed);
    while (node_in(seen) == node) {
      if (word_.compare_exchange_weak(seen, seen - 1, std::memory_order_release,
                                      std::memory_order_relaxed))
        return;
    }
    settle(node, -1);
  }

  mutable std::atomic<std::uint64_t> word_{0};
  mutable std::atomic<std::uintptr_t> owner_{0};
  mutable std::atomic<CountedObject*> noted_{nullptr};     // held by the owner
  mutable std::atomic<CountedObject*> replaced_{nullptr};  // held by the owner, replaced
  std::mutex changing_;
};

}  // namespace muster
