/// A place for a shared object that threads look at far more often than it changes.
///
/// To hold what stands there costs one atomic addition, to let go another: no lock, and the object's own count stays untouched. The place
/// and the number of those that hold from there are one word; who changes the place takes that number along and adds it to what its old
/// tenant is owed, so that whoever lets go last drops that.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace muster {

/// Thread-safe, but for its end.
template <class T>
class SharedSlot {
  struct Tenant {
    std::shared_ptr<T> object;
    std::atomic<std::int64_t> owed{0};  // since it moved out: holders; below 0 where they were quicker than that was written down
  };

 public:
  /// What stood there is kept as long as this lives. Empty, too, where so many hold it that the word cannot count them.
  class Hold {
   public:
    Hold() = default;
    explicit Hold(const SharedSlot& slot) : slot_(&slot) {
      std::uint64_t seen = slot.word_.load(std::memory_order_relaxed);
      while (seen != 0 && (seen & kHolders) != kHolders) {
        if (!slot.word_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire, std::memory_order_relaxed)) continue;
        tenant_ = tenant_in(seen);
        return;
      }
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    ~Hold() {
      if (tenant_ != nullptr) slot_->let_go(tenant_);
    }

    T* get() const { return tenant_ == nullptr ? nullptr : tenant_->object.get(); }

   private:
    const SharedSlot* slot_ = nullptr;
    Tenant* tenant_ = nullptr;
  };

  SharedSlot() = default;
  SharedSlot(const SharedSlot&) = delete;
  SharedSlot& operator=(const SharedSlot&) = delete;
  ~SharedSlot() { set(nullptr); }

  void set(std::shared_ptr<T> object) {
    std::uint64_t word = 0;
    if (object != nullptr) {
      auto tenant = std::make_unique<Tenant>();
      tenant->object = std::move(object);
      word = reinterpret_cast<std::uintptr_t>(tenant.get()) << kHolderBits;
      // Where addresses are longer than a word has room for, holders find nothing.
      tenant_in(word) == tenant.get() ? static_cast<void>(tenant.release()) : static_cast<void>(word = 0);
    }
    const std::uint64_t before = word_.exchange(word, std::memory_order_acq_rel);
    if (before != 0) settle(tenant_in(before), static_cast<std::int64_t>(before & kHolders));
  }

 private:
  static constexpr int kHolderBits = 16;
  static constexpr std::uint64_t kHolders = (std::uint64_t{1} << kHolderBits) - 1;

  static Tenant* tenant_in(std::uint64_t word) { return reinterpret_cast<Tenant*>(word >> kHolderBits); }

  static void settle(Tenant* tenant, std::int64_t change) {
    if (tenant->owed.fetch_add(change, std::memory_order_acq_rel) + change == 0) delete tenant;
  }

  // A tenant that is held is not deleted, so nobody else can stand there under its address.
  void let_go(Tenant* tenant) const {
    std::uint64_t seen = word_.load(std::memory_order_relaxed);
    while (tenant_in(seen) == tenant) {
      if (word_.compare_exchange_weak(seen, seen - 1, std::memory_order_release, std::memory_order_relaxed)) return;
    }
    settle(tenant, -1);
  }

  mutable std::atomic<std::uint64_t> word_{0};
};

}  // namespace muster
