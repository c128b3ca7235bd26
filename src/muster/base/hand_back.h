/// Memory that one core writes and another one reads, in turn.
///
/// What a core has read of another's writing stands in the caches of both, and before the writer can write there again every line must be
/// taken from both. On AMD's processors that is slow, and many lines at once make it no quicker: a line that the reader alone holds comes
/// in a third to a sixth of the time. So the only reader of such memory writes into each line it has read what stands there already.
/// Measured on EPYC (Zen 4), written and read once: 8 KiB 1.6 -> 0.6 us, 32 KiB 5.8 -> 2.1, 512 KiB 278 -> 48. On Xeon (Ice Lake) it makes
/// all of that slower: 32 KiB 4.8 -> 7.0 us, 512 KiB 60 -> 80.
#pragma once

#include <cstddef>

namespace muster {

/// Up to how many bytes, written at once, that is quicker here: any number on AMD's processors, but 4 KiB from Zen 5 on, which fetches more
/// ahead by itself. 0 on all others, where the functions below only read.
std::size_t most_handed_back() noexcept;
/// Whether it ever is.
inline bool hands_back() noexcept { return most_handed_back() > 0; }

/// Hands back `bytes` that the caller has read. They must be writable, the caller's alone to read, and nobody may write them meanwhile;
/// neighbours in the same lines may be anybody's.
void hand_back(const std::byte* memory, std::size_t bytes) noexcept;

/// Copies `bytes` and hands them back.
void copy_and_hand_back(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

}  // namespace muster
