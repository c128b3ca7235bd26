#include "core/shm/copy_past_caches.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/shm/line_copy.h"

namespace muster::shm {

#if defined(__x86_64__)
void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  // Whole lines only: a partial streaming store would have to read the rest of the line.
  const std::size_t head = std::min(
      bytes, (kCopiedLine - reinterpret_cast<std::uintptr_t>(to) % kCopiedLine) % kCopiedLine);
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + kCopiedLine <= bytes; at += kCopiedLine) stream_line(to + at, load_line(from + at));
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();
}
#else
void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
}
#endif

}  // namespace muster::shm
