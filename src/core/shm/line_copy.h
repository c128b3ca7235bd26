/// Moves a cache line through vector registers, for copies that do more than memcpy. Private to
/// shm/; the functions exist on x86-64 only.
#pragma once

#include <cstddef>
#include <iterator>

namespace muster::shm {
inline constexpr std::size_t kCopiedLine = 64;  // limit: of every processor that muster knows
}  // namespace muster::shm

#if defined(__x86_64__)
#include <emmintrin.h>

namespace muster::shm {

struct CopiedLine {
  __m128i parts[kCopiedLine / sizeof(__m128i)];
};

/// Any alignment.
inline CopiedLine load_line(const std::byte* from) noexcept {
  CopiedLine line;
  for (std::size_t i = 0; i < std::size(line.parts); ++i)
    line.parts[i] = _mm_loadu_si128(reinterpret_cast<const __m128i_u*>(from) + i);
  return line;
}
/// Any alignment.
inline void store_line(std::byte* to, const CopiedLine& line) noexcept {
  for (std::size_t i = 0; i < std::size(line.parts); ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i_u*>(to) + i, line.parts[i]);
}
/// Non-temporal, to the start of a line. These stores are weakly ordered: _mm_sfence makes them
/// visible.
inline void stream_line(std::byte* to, const CopiedLine& line) noexcept {
  for (std::size_t i = 0; i < std::size(line.parts); ++i)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line.parts[i]);
}

}  // namespace muster::shm
#endif
