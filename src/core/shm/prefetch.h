/// Prefetches of memory that is accessed soon.
#pragma once

#include <cstddef>

#include "core/shm/segment_layout.h"

namespace muster::shm {

/// For memory that will be written: takes exclusive ownership of its lines.
inline void prefetch_to_write(const std::byte* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kCacheLine) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(memory[at]));  // a no-op on processors without it
#else
    __builtin_prefetch(memory + at, 1);
#endif
  }
}

/// For memory that will be read.
inline void prefetch_to_read(const std::byte* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(memory + at, 0);
}

}  // namespace muster::shm
