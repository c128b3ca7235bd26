/// Recycles the memory of large received tensors. Fresh memory of that size costs more than the
/// copy into it, because the kernel maps and clears every page on first use.
///
/// Keeps a few of the most recent blocks per process; the kernel may reclaim their pages under
/// memory pressure. Thread-safe.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace muster::rpc {

/// Allocates `bytes` from torch's allocator. A large block is kept for reuse when it is freed.
c10::DataPtr allocate_or_reuse(std::size_t bytes);
/// Frees the kept blocks.
void drop_spare_memory();

}  // namespace muster::rpc
