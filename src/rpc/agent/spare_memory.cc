#include "rpc/agent/spare_memory.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/tunables/tunables_fixed.h"

namespace muster::rpc {
namespace {

constexpr std::size_t kMostBytes = std::size_t{512} << 20;     // limit: memory
constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;  // limit: the processor's

// Sanitizers cannot detect a use after free in memory that is recycled here.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kKeeps = false;
#else
constexpr bool kKeeps = true;
#endif

struct SparePiece {
  c10::DataPtr memory;
  std::size_t bytes = 0;
};

struct Spares {
  std::mutex mutex;
  std::vector<SparePiece> pieces;  // the latest last
  std::size_t bytes = 0;
};
Spares& spares() {
  static auto* all = new Spares;  // never destroyed: tensors may be freed last
  return *all;
}

/// Rounds up, so that sizes that differ by less than an eighth share blocks.
std::size_t rounded(std::size_t bytes) {
  const std::size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

/// The whole pages of this size in it.
void advise(void* memory, std::size_t bytes, std::uintptr_t page, int advice) {
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) & ~(page - 1);
  const auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) & ~(page - 1);
  if (end > begin) ::madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

void keep(SparePiece piece) {
  std::vector<SparePiece> gone;  // freed after the lock is released
  auto& all = spares();
  // In a forked child the lock may be held forever; then the memory is freed at once.
  const std::unique_lock lock(all.mutex, std::try_to_lock);
  if (!lock.owns_lock() || piece.bytes > kMostBytes) return;
  advise(piece.memory.get(), piece.bytes, 4096, MADV_FREE);
  all.bytes += piece.bytes;
  all.pieces.push_back(std::move(piece));
  while (all.pieces.size() > fixed::kInFlight || all.bytes > kMostBytes) {
    all.bytes -= all.pieces.front().bytes;
    gone.push_back(std::move(all.pieces.front()));
    all.pieces.erase(all.pieces.begin());
  }
}

c10::DataPtr reuse(std::size_t bytes) {
  auto& all = spares();
  const std::unique_lock lock(all.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return {};
  const auto found =
      std::find_if(all.pieces.rbegin(), all.pieces.rend(),
                   [bytes](const SparePiece& piece) { return piece.bytes == bytes; });
  if (found == all.pieces.rend()) return {};
  c10::DataPtr memory = std::move(found->memory);
  all.bytes -= bytes;
  all.pieces.erase(std::next(found).base());
  return memory;
}

void let_go(void* context) {
  keep(std::move(*std::unique_ptr<SparePiece>(static_cast<SparePiece*>(context))));
}

}  // namespace

c10::DataPtr allocate_or_reuse(std::size_t bytes) {
  auto* allocator = c10::GetCPUAllocator();
  if (!kKeeps || bytes < fixed::kIoShare) return allocator->allocate(bytes);
  const std::size_t size = rounded(bytes);
  auto piece = std::make_unique<SparePiece>();
  piece->bytes = size;
  piece->memory = reuse(size);
  if (!piece->memory) {
    piece->memory = allocator->allocate(size);
    // Huge pages are mapped and cleared in a third of the time; if the host has none, nothing
    // changes.
    if (size >= 2 * kHugePage) advise(piece->memory.get(), size, kHugePage, MADV_HUGEPAGE);
  }
  void* data = piece->memory.get();
  const auto device = piece->memory.device();
  return {data, piece.release(), &let_go, device};
}

void drop_spare_memory() {
  auto& all = spares();
  const std::lock_guard lock(all.mutex);
  all.pieces.clear();
  all.bytes = 0;
}

}  // namespace muster::rpc
