/// Memory of large tensors that came in messages, kept for the next ones: fresh memory of that size
/// costs more than the copy into it, since every page of it is found and cleared by the kernel on
/// first use.
///
/// A few pieces per process, the latest ones; the kernel may take what lies in them back whenever
/// it needs memory. Thread-safe.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace muster::rpc {

/// `bytes` of memory from torch's allocator; when they are let go they are kept for another call of
/// this, where they are many.
c10::DataPtr allocate_or_reuse(std::size_t bytes);
/// Gives back what is kept.
void drop_spare_memory();

}  // namespace muster::rpc
