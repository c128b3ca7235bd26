/// When a process and its machine began: with its number, the former tells a process from a later
/// one that got the number again.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace muster {

/// In the kernel's clock ticks since boot; 0 where there is no such process here; none where that
/// cannot be told now (no descriptor is left), and errno says why. Three system calls: every rank
/// asks for every other.
std::optional<std::uint64_t> process_start(std::int64_t pid);

/// Another one after every start of the machine; empty where /proc does not tell, or not now. Read
/// anew each time.
std::string boot_id();

}  // namespace muster
