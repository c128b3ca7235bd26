#include "muster/base/hand_back.h"

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace muster {
namespace {

constexpr std::size_t kLine = 64;

bool is_quicker() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

const bool quicker = is_quicker();

// By hand: a compiler would leave out stores that change nothing, and a race detector would object to other readers.
void write_back([[maybe_unused]] const std::byte* byte) noexcept {
#if defined(__x86_64__)
  std::byte kept;
  asm volatile("movb %1, %0\n\tmovb %0, %1" : "=&q"(kept), "+m"(const_cast<std::byte&>(*byte)));
#endif
}

}  // namespace

bool hands_back() noexcept { return quicker; }

void hand_back(const std::byte* memory, std::size_t bytes) noexcept {
  if (!quicker) return;
  for (std::size_t at = 0; at < bytes; at += kLine) write_back(memory + at);
}

void copy_and_hand_back(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
#if defined(__x86_64__)
  if (quicker) {
    // Copying first and handing back what was copied takes a third longer.
    std::size_t at = 0;
    for (; at + kLine <= bytes; at += kLine) {
      auto* source = reinterpret_cast<__m128i*>(const_cast<std::byte*>(from + at));
      auto* target = reinterpret_cast<__m128i*>(to + at);
      const __m128i first = _mm_loadu_si128(source), second = _mm_loadu_si128(source + 1);
      const __m128i third = _mm_loadu_si128(source + 2), fourth = _mm_loadu_si128(source + 3);
      _mm_storeu_si128(target, first);
      _mm_storeu_si128(target + 1, second);
      _mm_storeu_si128(target + 2, third);
      _mm_storeu_si128(target + 3, fourth);
      asm volatile("movups %1, %0" : "=m"(*source) : "x"(first));  // like write_back
    }
    std::memcpy(to + at, from + at, bytes - at);
    hand_back(from + at, bytes - at);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace muster
