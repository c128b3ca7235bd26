// SPDX-License-Identifier: BSD-3-Clause
/// Adapts a store of stock torch, over which the engine's ranks meet.
///
/// `compat/` has muster's engine as a `c10d::Backend` of stock torch. It is the only folder that
/// may include torch's own distributed code; it takes no part in muster's own interface. May
/// include everything of group/ and below. Test it alone: `ctest -R '^python.torch'`.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>

#include "muster/clock.h"
#include "muster/key_value_store.h"

namespace muster::compat {

/// Every rank of a job calls it at init; blocks until all have come, and gives what `adapt_store`
/// makes of the part of `store` that is this init's own. The ranks of earlier inits, of this
/// process or of one that a launcher has started again, may have left anything there.
Result<std::shared_ptr<store::Store>> meet_on(const c10::intrusive_ptr<c10d::Store>& store,
                                              int rank, int world_size, Duration timeout);

/// Everything of `store::Store` but queues (Code::unsupported where the store has none). Keys are
/// separated from others' only by the prefix of the given store. `store` is used from several
/// threads; if other users block on it, the caller must pass a clone.
std::shared_ptr<store::Store> adapt_store(c10::intrusive_ptr<c10d::Store> store,
                                          Duration timeout = store::kDefaultTimeout);

}  // namespace muster::compat
