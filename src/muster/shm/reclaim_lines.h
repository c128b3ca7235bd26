/// Ownership of cache lines that one core writes and another one reads, in turn (migratory
/// sharing).
///
/// A line that a core has read stands in the caches of both, and the writer must take it from both
/// before it can write it again. On AMD's processors that is slow, and many lines at once do not
/// make it faster: a line that the reader alone owns comes back in a third to a twentieth of the
/// time. So the reader of such memory writes into each line it has read what stands there already.
/// Measured on EPYC, 512 KiB written and then read: Zen 4 278 -> 48 us; Zen 5 62 -> 23 if both
/// cores share their last cache, and 255 -> 48 (64 KiB: 32 -> 8) if they do not, which a virtual
/// machine's cores do by turns. On Xeon (Ice Lake) it makes all of that slower: 32 KiB 4.8 -> 7.0
/// us, 512 KiB 60 -> 80.
#pragma once

#include <cstddef>

namespace muster::shm {

/// Whether several readers may reclaim the same memory at the same time. That does no harm, since
/// all write what stands there, but a race detector objects.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kSeveralReclaim = false;
#else
inline constexpr bool kSeveralReclaim = true;
#endif

/// Whether reclaiming pays on this CPU: on AMD's. On all others the functions below only read.
bool writes_back_lines() noexcept;

/// Takes ownership of the lines of `bytes` that the caller has read. They must be writable, and
/// nobody may write them meanwhile but others who reclaim them (`kSeveralReclaim`). Neighbours in
/// the same lines may be anybody's.
void reclaim_lines(const std::byte* memory, std::size_t bytes) noexcept;

/// Copies `bytes` and reclaims them, line by line; or all of them `past_caches`
/// (shm/copy_past_caches.h), and reclaims them then.
void copy_and_reclaim_lines(std::byte* to, const std::byte* from, std::size_t bytes,
                            bool past_caches = false) noexcept;

}  // namespace muster::shm
