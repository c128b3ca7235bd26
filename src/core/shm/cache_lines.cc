// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/cache_lines.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace muster::shm {
namespace {

constexpr std::size_t kCopiedLine = 64;  // limit: of every processor that muster knows

#if defined(__x86_64__)
// Moves a cache line through vector registers, for copies that do more than memcpy.
struct CopiedLine {
  __m128i parts[kCopiedLine / sizeof(__m128i)];
};

/// Any alignment.
CopiedLine load_line(const std::byte* from) noexcept {
  CopiedLine line;
  for (std::size_t i = 0; i < std::size(line.parts); ++i)
    line.parts[i] = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from) + i);
  return line;
}
/// Any alignment.
void store_line(std::byte* to, const CopiedLine& line) noexcept {
  for (std::size_t i = 0; i < std::size(line.parts); ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to) + i, line.parts[i]);
}
/// Non-temporal, to the start of a line. These stores are weakly ordered: _mm_sfence makes them
/// visible.
void stream_line(std::byte* to, const CopiedLine& line) noexcept {
  for (std::size_t i = 0; i < std::size(line.parts); ++i)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line.parts[i]);
}
#endif

}  // namespace

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
