// SPDX-License-Identifier: BSD-3-Clause
/// Cache lines moved with care: past the caches, ahead of their use, and between two cores that
/// write and read them in turn.
#pragma once

#include <cstddef>

#include "core/shm/segment_layout.h"

namespace muster::shm {

/// Like memcpy, by non-temporal copies, for data that does not fit the caches.
///
/// An ordinary store first reads the line that it writes. When all concurrent writers together
/// exceed the caches, that read is wasted and evicts data that other ranks need. Streaming stores
/// then take little more than half the time. Measured on EPYC (Zen 4, 32 MiB last-level cache),
/// from a warm 16 KiB at a time: 8 MiB 465 -> 376 us, 16 MiB 1114 -> 768, 64 MiB 4879 -> 3072.
/// Below that they are slower: 4 MiB 107 -> 192. The C library has the same optimization, but
/// decides by the size of a single copy, and muster copies in pieces.
///
/// Pays off from `tunables().past_caches` bytes on, counted over all concurrent
/// writers on a host. The data can be published to other threads as after ordinary stores.
void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;

/// Prefetches memory that will be written soon: takes exclusive ownership of its lines.
inline void prefetch_to_write(const std::byte* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kCacheLine) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(memory[at]));  // a no-op on processors without it
#else
    __builtin_prefetch(memory + at, 1);
#endif
  }
}

/// Prefetches memory that will be read soon.
inline void prefetch_to_read(const std::byte* memory, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(memory + at, 0);
}

// Ownership of cache lines that one core writes and another reads in turn (migratory sharing).
//
// After a read, a line is in the caches of both cores, and the writer must invalidate the reader's
// copy before it can write again. On AMD processors that is slow and does not overlap across
// lines. A line that only the reader owns comes back in a third to a twentieth of the time. So the
// reader writes back into each line the value that it has just read. Measured on EPYC, 512 KiB
// written and then read: Zen 4 278 -> 48 us; Zen 5 62 -> 23 us if both cores share a last-level
// cache, 255 -> 48 us (64 KiB: 32 -> 8 us) if not. The cores of a virtual machine alternate
// between the two. On Xeon (Ice Lake) reclaiming is slower: 32 KiB 4.8 -> 7.0 us, 512 KiB 60 -> 80
// us.

/// Whether several readers may reclaim the same memory concurrently. It is harmless, since all
/// write the value that is already there, but a race detector reports it.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kConcurrentReclaim = false;
#else
inline constexpr bool kConcurrentReclaim = true;
#endif

/// Whether reclaiming pays off on this CPU (AMD). On others the functions below only read.
bool writes_back_lines() noexcept;

/// Takes exclusive ownership of the lines of `bytes` that the caller has read. The memory must be
/// writable, and no other thread may write it concurrently except to reclaim it
/// (`kConcurrentReclaim`). Only `bytes` are written, so the rest of the first and last line may
/// belong to others.
void reclaim_lines(const std::byte* memory, std::size_t bytes) noexcept;

/// Copies `bytes` and reclaims them line by line. With `past_caches` it copies everything with
/// `copy_past_caches` and reclaims afterwards.
void copy_and_reclaim_lines(std::byte* to, const std::byte* from, std::size_t bytes,
                            bool past_caches = false) noexcept;

}  // namespace muster::shm
