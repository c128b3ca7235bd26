/// Memory read in words of 8 bytes. What has just been written in words is slow to read in anything
/// wider: the read waits until all of it has left the processor's store buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace muster {

/// The word at `from`, in a register of its own.
inline std::uint64_t word_at(const void* from) noexcept {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
#if defined(__GNUC__)
  asm("" : "+r"(word));
#endif
  return word;
}

template <std::size_t Words>
inline void copy_words(void* to, const void* from) noexcept {
  for (std::size_t i = 0; i < Words; ++i) {
    const std::uint64_t word = word_at(static_cast<const std::byte*>(from) + 8 * i);
    std::memcpy(static_cast<std::byte*>(to) + 8 * i, &word, sizeof word);
  }
}

template <std::size_t Words>
inline bool equal_words(const void* a, const void* b) noexcept {
  std::uint64_t unlike = 0;
  for (std::size_t i = 0; i < Words; ++i)
    unlike |= word_at(static_cast<const std::byte*>(a) + 8 * i) ^
              word_at(static_cast<const std::byte*>(b) + 8 * i);
  return unlike == 0;
}

/// So much, in words and then in bytes.
inline void copy_few(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  for (; bytes >= 8; bytes -= 8, to += 8, from += 8) copy_words<1>(to, from);
  for (; bytes > 0; --bytes) *to++ = *from++;
}

}  // namespace muster
