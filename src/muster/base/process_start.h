/// When a process began: with its number, that tells it from a later one that got the number again.
#pragma once

#include <cstdint>

namespace muster {

/// In the kernel's clock ticks since boot; 0 where there is no such process here. Three system calls: every rank asks for every other.
std::uint64_t process_start(std::int64_t pid);

}  // namespace muster
