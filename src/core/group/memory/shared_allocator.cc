// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/memory/shared_allocator.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "core/base/environment.h"
#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "core/shm/arena/arena.h"
#include "muster/shared_memory.h"

namespace muster {

struct group::SharedSizes::Wanted {
  shm::Arena* arena = nullptr;     // keeps freed memory of these sizes
  std::vector<std::size_t> sizes;  // ascending
  // The thread that began it, by the address of its t_wanted. Relaxed: only that thread acts on it,
  // and any other thread may end it.
  std::atomic<const void*> thread{nullptr};
};

namespace {

using shm::Arena;
using Wanted = group::SharedSizes::Wanted;

// The SharedSizes this thread has begun, including ended ones not yet removed. Allocations read the
// plain pointer, which is safe even during thread exit.
struct AllWanted {
  ~AllWanted();
  std::vector<std::shared_ptr<const Wanted>> each;
};
constinit thread_local const AllWanted* t_wanted = nullptr;
AllWanted::~AllWanted() { t_wanted = nullptr; }

bool is_wanted(const Wanted& wanted) {
  return wanted.thread.load(std::memory_order_relaxed) == &t_wanted;
}
bool is_wanted(std::size_t bytes) {
  if (t_wanted == nullptr) return false;
  return std::ranges::any_of(t_wanted->each, [bytes](const auto& wanted) {
    return is_wanted(*wanted) &&
           std::binary_search(wanted->sizes.begin(), wanted->sizes.end(), bytes);
  });
}

constexpr std::size_t kPrivateUpTo = SharedAllocatorOptions{}.private_up_to;
constexpr std::size_t kDisabled = std::numeric_limits<std::size_t>::max();
// Higher than the usual priority of libraries' allocators.
constexpr std::uint8_t kPriority = 200;

class SharedAllocator final : public c10::Allocator {
 public:
  explicit SharedAllocator(c10::Allocator* below) : below_(below) {
    free_below_ = below->raw_deleter();
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const bool shared = bytes > private_up_to_.load(std::memory_order_relaxed) || is_wanted(bytes);
    void* memory = shared ? in_arena(bytes) : nullptr;
    if (memory == nullptr) memory = below_->raw_allocate(bytes);
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void use_above(std::size_t private_up_to) {
    private_up_to_.store(private_up_to, std::memory_order_relaxed);
  }
  bool enabled() const { return private_up_to_.load(std::memory_order_relaxed) != kDisabled; }
  std::uint64_t fallbacks() const { return fallbacks_.load(std::memory_order_relaxed); }

 private:
  void* in_arena(std::size_t bytes) {
    Arena* const arena = Arena::if_made();
    if (arena == nullptr) return nullptr;  // a forked child
    const auto memory = arena->allocate(bytes);
    if (!memory) {
      fallbacks_.fetch_add(1, std::memory_order_relaxed);
      return nullptr;
    }
    c10::profiledCPUMemoryReporter().New(*memory, bytes);
    return *memory;
  }
  static void release(void* memory) {
    Arena* const arena = Arena::holder_of(static_cast<std::byte*>(memory));
    if (arena == nullptr) return free_below_(memory);
    c10::profiledCPUMemoryReporter().Delete(memory);
    arena->free(static_cast<std::byte*>(memory));
  }

  static inline c10::DeleterFnPtr free_below_ =
      nullptr;  // torch frees through a plain function pointer
  c10::Allocator* const below_;
  std::atomic<std::size_t> private_up_to_{kDisabled};
  std::atomic<std::uint64_t> fallbacks_{0};
};

std::atomic<SharedAllocator*> g_installed{nullptr};

// Never destroyed: tensors it allocated may outlive everything.
SharedAllocator& installed() {
  static SharedAllocator* const one = [] {
    c10::Allocator* below = c10::GetCPUAllocator();
    if (below->raw_deleter() == nullptr) below = c10::GetDefaultCPUAllocator();
    auto* const made = new SharedAllocator(below);
    // For threads that allocate concurrently: torch stores a plain pointer.
    std::atomic_thread_fence(std::memory_order_release);
    c10::SetCPUAllocator(made, kPriority);
    g_installed.store(made, std::memory_order_release);
    return made;
  }();
  return *one;
}

}  // namespace

void use_shared_allocator(const SharedAllocatorOptions& options) {
  if (!options.enabled) {
    if (auto* const there = g_installed.load(std::memory_order_acquire))
      there->use_above(kDisabled);
    return;
  }
  auto* const arena = group::take(Arena::of_process());
  arena->set_limits({.most = options.limit.value_or(0), .keep = options.keep});
  if (options.read_only) arena->make_read_only();
  SharedAllocator& allocator = installed();
  if (c10::GetCPUAllocator() != &allocator)
    throw DistError(
        "use_shared_allocator: another library's allocator of CPU tensors has a higher priority",
        Code::unsupported);
  allocator.use_above(options.private_up_to);
}

SharedAllocatorStats shared_allocator_stats() {
  SharedAllocatorStats stats;
  if (const auto* const allocator = g_installed.load(std::memory_order_acquire)) {
    stats.enabled = allocator->enabled() && Arena::if_made() != nullptr;
    stats.fallbacks = allocator->fallbacks();
  }
  if (const auto* const arena = Arena::if_made()) {
    const auto now = arena->stats();
    stats.bytes_in_use = now.bytes_in_use;
    stats.bytes_quarantined = now.bytes_quarantined;
    stats.bytes_reserved = now.bytes_in_use + now.bytes_kept + now.bytes_quarantined;
    stats.limit = now.most;
    stats.bytes_returned = now.bytes_returned;
    stats.allocations = now.allocations;
  }
  return stats;
}

void trim_shared_allocator() {
  if (auto* const arena = Arena::if_made()) arena->trim();
}

void group::share_memory_if_asked(std::optional<bool> wanted) {
  if (!wanted) wanted = take(env_flag("MUSTER_SHARE_MEMORY"));
  if (!wanted.value_or(false) || shared_allocator_stats().enabled) return;
  try {
    use_shared_allocator();
  } catch (const DistError& error) {  // then the bytes of calls are copied
    if (error.code() != Code::exhausted) throw;
    log(LogLevel::warning, std::string("tensors stay private: ") + error.what());
  }
}

group::SharedSizes::SharedSizes(std::vector<std::size_t> bytes) {
  std::erase_if(bytes, [](std::size_t size) { return size <= kPrivateUpTo; });
  if (bytes.empty() || !take(env_flag("MUSTER_SHARE_MEMORY")).value_or(true)) return;
  const auto arena = Arena::of_process();
  if (!arena || c10::GetCPUAllocator()->raw_deleter() == nullptr)
    return;  // then everything stays private
  installed();
  std::ranges::sort(bytes);
  kept_ = std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
  (*arena)->keep_more(static_cast<std::ptrdiff_t>(kept_));
  wanted_ = std::make_shared<Wanted>();
  wanted_->arena = *arena;
  wanted_->sizes = std::move(bytes);
}

group::SharedSizes::~SharedSizes() {
  end();
  // A forked child has another arena, which keeps nothing for this object.
  if (wanted_ && wanted_->arena == Arena::if_made())
    wanted_->arena->keep_more(-static_cast<std::ptrdiff_t>(kept_));
}

void group::SharedSizes::begin() {
  if (!wanted_) return;
  thread_local AllWanted all;
  std::erase_if(all.each,
                [this](const auto& wanted) { return wanted == wanted_ || !is_wanted(*wanted); });
  all.each.push_back(wanted_);
  wanted_->thread.store(&t_wanted, std::memory_order_relaxed);
  t_wanted = &all;
}

void group::SharedSizes::end() noexcept {
  if (wanted_) wanted_->thread.store(nullptr, std::memory_order_relaxed);
}

at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu())
    group::invalid("empty_shared: the arena holds CPU tensors only, not " + options.device().str());
  for (const auto size : sizes)
    if (size < 0) group::invalid("empty_shared: shape " + c10::str(sizes) + " has a negative size");
  auto* arena = group::take(shm::Arena::of_process());
  std::uint64_t bytes = c10::elementSize(c10::typeMetaToScalarType(options.dtype()));
  for (const auto size : sizes)
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes))
      group::invalid("empty_shared: a tensor of shape " + c10::str(sizes) +
                     " is larger than any memory");
  auto* memory = group::take(arena->allocate(static_cast<std::size_t>(bytes)));
  return at::for_blob(memory, sizes)
      .deleter([arena](void* freed) { arena->free(static_cast<std::byte*>(freed)); })
      .options(options)
      .resizeable_storage()
      .allocator(c10::GetCPUAllocator())
      .make_tensor();
}

bool in_shared_memory(const at::Tensor& tensor) {
  const auto* const arena = shm::Arena::if_made();
  if (arena == nullptr || !tensor.defined() || !tensor.has_storage() || !tensor.is_cpu())
    return false;
  const auto& storage = tensor.storage();
  return arena->offset_of(static_cast<const std::byte*>(storage.data()), storage.nbytes())
      .has_value();
}

}  // namespace muster
