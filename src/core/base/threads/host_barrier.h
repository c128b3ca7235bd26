/// A full fence between two processes of which one side pays for both.
///
/// Two sides that each store something and then look at what the other has stored need a full fence
/// in between, each of them: else both may miss what the other did. Where one side does so a
/// million times a second and the other seldom (before it sleeps), the latter can send a barrier:
/// the system then makes every processor that runs a thread of a process which takes part pass a
/// full fence, and returns when all have. The former needs none of its own any more; a fence that
/// waits for a line which another core has just read costs it up to 50 ns.
#pragma once

#include <atomic>

namespace muster {

/// Whether this process takes part: barriers sent by any process of this host reach its threads.
/// Asked of the system when first called; from then on the answer stays. Not where the system knows
/// no such barriers (`membarrier`, Linux 4.16) or a filter of system calls forbids them, nor under
/// ThreadSanitizer, which does not know of them.
bool takes_host_barriers() noexcept;

/// What every thread of a process that takes part did before it is done before this returns, what
/// it does afterwards sees what the caller did before. Some microseconds; a full fence for the
/// caller at any rate (but under ThreadSanitizer: nothing).
void send_host_barrier() noexcept;

/// Stands where a process that takes part would need its full fence. Only keeps the compiler from
/// moving reads and writes across it.
inline void meet_host_barrier() noexcept { std::atomic_signal_fence(std::memory_order_seq_cst); }

}  // namespace muster
