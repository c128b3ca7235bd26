#include "muster/base/hand_back.h"

#include <algorithm>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace muster {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kBlock = 4096;  // copied before its lines are handed back: they are still near

#if defined(__x86_64__)
/// The family of an AMD processor; 0: another one.
unsigned amd_family() noexcept {
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__builtin_cpu_is("amd") == 0 || __get_cpuid(1, &a, &b, &c, &d) == 0) return 0;
  return (a >> 8 & 0xf) + (a >> 20 & 0xff);
}
#else
unsigned amd_family() noexcept { return 0; }
#endif

std::size_t find_most() noexcept {
  constexpr unsigned kZen5 = 0x1a;
  const unsigned family = amd_family();
  if (family == 0) return 0;
  return family < kZen5 ? std::numeric_limits<std::size_t>::max() : 4096;
}

const std::size_t most = find_most();

}  // namespace

std::size_t most_handed_back() noexcept { return most; }

void hand_back(const std::byte* memory, std::size_t bytes) noexcept {
  if (most == 0) return;
  auto* const lines = const_cast<volatile std::byte*>(memory);
  for (std::size_t at = 0; at < bytes; at += kLine) lines[at] = lines[at];
}

void copy_and_hand_back(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  for (std::size_t at = 0; at < bytes; at += kBlock) {
    const std::size_t now = std::min(kBlock, bytes - at);
    std::memcpy(to + at, from + at, now);
    hand_back(from + at, now);
  }
}

}  // namespace muster
