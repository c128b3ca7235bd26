// SPDX-License-Identifier: BSD-3-Clause
/// A full fence between two processes of which one side pays for both.
///
/// Two sides that each store something and then look at what the other has stored each need a full
/// fence in between: else both may miss what the other did. If one side does so a million times a
/// second and the other seldom (before it sleeps), the latter can send a barrier: the system makes
/// every processor that runs a thread of a participating process pass a full fence, and returns
/// when all have. The former then needs no fence of its own, which would cost it up to 50 ns for a
/// line that another core has just read.
#pragma once

#include <atomic>

namespace muster {

/// Whether this process takes part: barriers sent by any process of this host reach its threads.
/// Asked of the system when first called; from then on the answer stays. Not where the system knows
/// no such barriers (`membarrier`, Linux 4.16) or a filter of system calls forbids them, nor under
/// ThreadSanitizer, which does not know of them.
bool takes_host_barriers() noexcept;

/// A full fence on every thread of every participating process: its earlier memory accesses are
/// done before this returns, and its later ones see what the caller did before. Takes some
/// microseconds. A full fence for the caller in any case, except under ThreadSanitizer, where it
/// does nothing.
void send_host_barrier() noexcept;

/// Stands where a process that takes part would need its full fence. Only keeps the compiler from
/// moving reads and writes across it.
inline void meet_host_barrier() noexcept { std::atomic_signal_fence(std::memory_order_seq_cst); }

}  // namespace muster
