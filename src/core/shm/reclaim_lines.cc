#include "core/shm/reclaim_lines.h"

#include <cstring>

#include "core/shm/copy_past_caches.h"
#include "core/shm/line_copy.h"

namespace muster::shm {
namespace {

bool is_quicker() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

const bool quicker = is_quicker();

}  // namespace

bool writes_back_lines() noexcept { return quicker; }

void reclaim_lines(const std::byte* memory, std::size_t bytes) noexcept {
  if (!quicker) return;
  auto* const lines = const_cast<volatile std::byte*>(memory);
  for (std::size_t at = 0; at < bytes; at += kCopiedLine) lines[at] = lines[at];
}

void copy_and_reclaim_lines(std::byte* to, const std::byte* from, std::size_t bytes,
                            bool past_caches) noexcept {
  if (past_caches) {
    // In two passes: streaming stores stall when other stores are interleaved.
    copy_past_caches(to, from, bytes);
    return reclaim_lines(from, bytes);
  }
  std::size_t at = 0;
#if defined(__x86_64__)
  // Reclaiming in a second pass takes a third longer.
  for (; quicker && at + kCopiedLine <= bytes; at += kCopiedLine) {
    const CopiedLine line = load_line(from + at);
    store_line(to + at, line);
    const_cast<volatile std::byte&>(from[at]) =
        static_cast<std::byte>(_mm_cvtsi128_si32(line.parts[0]));
  }
#endif
  std::memcpy(to + at, from + at, bytes - at);
  reclaim_lines(from + at, bytes - at);
}

}  // namespace muster::shm
