/// A place for a shared object that threads look at far more often than it changes.
///
/// To hold what stands there costs one atomic addition, to let go another: no lock, and the
/// object's own count stays untouched. The place and the number of those that hold from there are
/// one word; who changes the place takes that number along and adds it to what its old tenant is
/// owed, so that whoever lets go last drops that. The first thread that comes is favoured: what it
/// holds it only writes down, and who changes the place sends a barrier (`host_barrier.h`) and
/// looks there.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "muster/base/bias.h"

namespace muster {

/// Thread-safe, but for its end.
template <class T>
class SharedSlot {
  struct Tenant {
    std::shared_ptr<T> object;
    std::atomic<std::int64_t> owed{0};  // since it moved out: holders; below 0 where they were
                                        // quicker than that was written down
  };

 public:
  /// What stood there is kept as long as this lives. Empty, too, where so many hold it that the
  /// word cannot count them.
  class Hold {
   public:
    Hold() = default;
    explicit Hold(const SharedSlot& slot) : slot_(&slot) {
      if (slot.is_favoured() && (tenant_ = slot.note_down()) != nullptr) {
        noted_ = true;
        return;
      }
      tenant_ = slot.count_in();
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    ~Hold() {
      if (noted_) {
        slot_->strike_out(tenant_);
      } else if (tenant_ != nullptr) {
        slot_->let_go(tenant_);
      }
    }

    T* get() const { return tenant_ == nullptr ? nullptr : tenant_->object.get(); }

   private:
    const SharedSlot* slot_ = nullptr;
    Tenant* tenant_ = nullptr;
    bool noted_ = false;  // by the favoured thread
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
      tenant_in(word) == tenant.get() ? static_cast<void>(tenant.release())
                                      : static_cast<void>(word = 0);
    }
    const std::lock_guard one_at_a_time(changing_);
    const std::uint64_t before = word_.exchange(word, std::memory_order_acq_rel);
    if (before != 0)
      settle(tenant_in(before),
             static_cast<std::int64_t>(before & kHolders) + favoured_holds(tenant_in(before)));
  }

 private:
  static constexpr int kHolderBits = 16;
  static constexpr std::uint64_t kHolders = (std::uint64_t{1} << kHolderBits) - 1;

  static Tenant* tenant_in(std::uint64_t word) {
    return reinterpret_cast<Tenant*>(word >> kHolderBits);
  }

  static void settle(Tenant* tenant, std::int64_t change) {
    if (tenant->owed.fetch_add(change, std::memory_order_acq_rel) + change == 0) delete tenant;
  }

  bool is_favoured() const {
    const std::uintptr_t known = favoured_.load(std::memory_order_relaxed);
    return known == bias_detail::this_thread() || (known == 0 && favour());
  }
  [[gnu::noinline, gnu::cold]] bool favour() const {
    std::uintptr_t nobody = 0;
    if (!takes_host_barriers() ||
        !favoured_.compare_exchange_strong(nobody, bias_detail::this_thread(),
                                           std::memory_order_relaxed))
      return false;
    std::atomic_thread_fence(
        std::memory_order_seq_cst);  // who has seen nobody favoured has changed the place before
                                     // this looks there
    return true;
  }
  [[gnu::noinline]] Tenant* count_in() const {
    std::uint64_t seen = word_.load(std::memory_order_relaxed);
    while (seen != 0 && (seen & kHolders) != kHolders) {
      if (word_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire,
                                      std::memory_order_relaxed))
        return tenant_in(seen);
    }
    return nullptr;
  }
  /// The favoured thread: holds what stands there; null where it is to count itself in, since it
  /// holds something already or the tenant has just moved out.
  Tenant* note_down() const {
    if (noted_.load(std::memory_order_relaxed) != nullptr) return nullptr;
    Tenant* const tenant = tenant_in(word_.load(std::memory_order_relaxed));
    if (tenant == nullptr) return nullptr;
    noted_.store(tenant, std::memory_order_release);
    meet_host_barrier();  // from here on it is either seen there, or sees here that the place has
                          // changed
    if (tenant_in(word_.load(std::memory_order_acquire)) == tenant) [[likely]]
      return tenant;
    strike_out(tenant);
    return nullptr;
  }
  void strike_out(Tenant* tenant) const {
    noted_.store(nullptr, std::memory_order_release);
    meet_host_barrier();
    if (moved_out_.load(std::memory_order_relaxed) == tenant) [[unlikely]]
      leave_moved(tenant);
  }
  [[gnu::noinline, gnu::cold]] void leave_moved(Tenant* tenant) const {
    Tenant* expected = tenant;
    if (moved_out_.compare_exchange_strong(expected, nullptr, std::memory_order_acq_rel))
      settle(tenant, -1);
  }
  /// Whether the favoured thread holds `tenant`, which stands there no longer, and will settle that
  /// when it lets go: 1 or 0.
  std::int64_t favoured_holds(Tenant* tenant) const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (favoured_.load(std::memory_order_relaxed) == 0) return 0;
    send_host_barrier();
    if (noted_.load(std::memory_order_acquire) != tenant) return 0;
    // It holds only this one, so nothing else is waited for.
    moved_out_.store(tenant, std::memory_order_release);
    send_host_barrier();
    if (noted_.load(std::memory_order_acquire) == tenant) return 1;
    // It has let go meanwhile; perhaps it has seen that it was to settle.
    Tenant* expected = tenant;
    return moved_out_.compare_exchange_strong(expected, nullptr, std::memory_order_acq_rel) ? 0 : 1;
  }

  // A tenant that is held is not deleted, so nobody else can stand there under its address.
  [[gnu::noinline]] void let_go(Tenant* tenant) const {
    std::uint64_t seen = word_.load(std::memory_order_relaxed);
    while (tenant_in(seen) == tenant) {
      if (word_.compare_exchange_weak(seen, seen - 1, std::memory_order_release,
                                      std::memory_order_relaxed))
        return;
    }
    settle(tenant, -1);
  }

  mutable std::atomic<std::uint64_t> word_{0};
  mutable std::atomic<std::uintptr_t> favoured_{0};
  mutable std::atomic<Tenant*> noted_{nullptr};  // what the favoured thread holds
  mutable std::atomic<Tenant*> moved_out_{
      nullptr};  // what it holds of those that stand there no longer
  std::mutex changing_;
};

}  // namespace muster
