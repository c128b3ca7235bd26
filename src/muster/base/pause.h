/// A short rest between two looks at memory that another core is to write.
#pragma once

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <thread>
#endif

namespace muster {

/// Some tens of nanoseconds; leaves the core's units to its other hardware thread meanwhile.
inline void pause_once() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#else
  std::this_thread::yield();
#endif
}

}  // namespace muster
