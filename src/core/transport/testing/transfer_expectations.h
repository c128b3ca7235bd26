// SPDX-License-Identifier: BSD-3-Clause
/// The waits of this folder's tests, and their limits.
#pragma once

#include "core/transport/fabric.h"
#include "muster/clock.h"

namespace muster::transport {

/// A limit for what is to happen at once, for defects.
inline TimePoint soon() { return steady_clock().now() + std::chrono::seconds(60); }

/// Waits for a transfer; its status, or timed_out where it is not done within the limit.
inline Status finish(Fabric& fabric, const TransferRef& transfer,
                     Duration limit = std::chrono::seconds(60)) {
  if (!fabric.wait([&] { return transfer->done(); }, steady_clock().now() + limit))
    return Status(Code::timed_out, "the transfer was not done in " + describe(limit));
  return transfer->status();
}

}  // namespace muster::transport
