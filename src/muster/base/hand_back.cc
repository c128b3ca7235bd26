#include "muster/base/hand_back.h"

#include <algorithm>
#include <cstring>

namespace muster {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kBlock = 4096;  // copied before its lines are handed back: they are still near

bool is_amd() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

const bool does = is_amd();

}  // namespace

bool hands_back() noexcept { return does; }

void hand_back(const std::byte* memory, std::size_t bytes) noexcept {
  if (!does) return;
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
