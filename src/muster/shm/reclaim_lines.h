/// Memory that one core writes and another one reads, in turn.
///
/// What a core has read of another's writing stands in the caches of both, and before the writer
/// can write there again every line must be taken from both. On AMD's processors that is slow, and
/// many lines at once make it no quicker: a line that the reader alone holds comes in a third to a
/// twentieth of the time. So a reader of such memory writes into each line it has read what stands
/// there already. Measured on EPYC, 512 KiB written and then read: Zen 4 278 -> 48 us; Zen 5 62 ->
/// 23 where both cores share their last cache, and 255 -> 48 (64 KiB: 32 -> 8) where they do not,
/// which a virtual machine's cores do by turns. On Xeon (Ice Lake) it makes all of that slower: 32
/// KiB 4.8 -> 7.0 us, 512 KiB 60 -> 80.
#pragma once

#include <cstddef>

namespace muster::shm {

/// Bytes that are worked on before their lines are handed back: they are at hand still. (Of two
/// ranks' all_reduce of 1 MiB on Zen 5: 55 us with 2 KiB, 74 with 8.)
inline constexpr std::size_t kHandedBlock = 2048;

/// Whether several readers may hand back the same memory at the same time. That does no harm, since
/// all write what stands there, but a race detector objects.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kSeveralHandBack = false;
#else
inline constexpr bool kSeveralHandBack = true;
#endif

/// Whether that is quicker here: on AMD's processors. On all others the functions below only read.
bool hands_back() noexcept;

/// Hands back `bytes` that the caller has read. They must be writable, and nobody may write them
/// meanwhile but others who hand them back
/// (`kSeveralHandBack`); neighbours in the same lines may be anybody's.
void hand_back(const std::byte* memory, std::size_t bytes) noexcept;

/// Copies `bytes` and hands them back, line by line; or all of them `past_caches`
/// (shm/copy_past_caches.h), and hands them back then.
void copy_and_hand_back(std::byte* to, const std::byte* from, std::size_t bytes,
                        bool past_caches = false) noexcept;

}  // namespace muster::shm
