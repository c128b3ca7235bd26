// SPDX-License-Identifier: BSD-3-Clause
/// Tensors in memory that the other ranks of this host can map. Collectives on them need no copies.
///
/// `empty_shared` makes one such tensor. `use_shared_allocator` puts every CPU tensor there: it
/// replaces torch's CPU allocator by one that allocates from the process's arena, which the other
/// ranks of the host map. docs/user/shared-memory.md gives benefits, costs and risks.
///
/// The allocator applies to the whole process, before, during and after any job. Tensors made
/// earlier and memory torch got elsewhere (from_numpy, from_blob, mapped files) stay where they
/// are; calls on them copy as before and give the same results.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace muster {

struct SharedAllocatorOptions {
  bool enabled = true;  ///< false: tensors made from now on are private
  /// Tensors up to this many bytes stay private; calls on them copy anyway.
  std::size_t private_up_to = 16 * 1024;
  /// Maximum size of the arena in bytes. Default: the memory of the machine or of the control
  /// group.
  std::optional<std::size_t> limit = {};
  /// Bytes of freed memory kept for later tensors; more than that is returned to the system.
  std::size_t keep = std::size_t{256} << 20;
  /// Other ranks map this process's tensors for reading only. all_reduce and reduce then copy
  /// results out; other calls are as fast. Prevents mistakes, not malice: a process of the same
  /// user can open the memory for writing again. Cannot be undone. A rank that mapped the arena
  /// earlier could still write.
  bool read_only = false;
};

/// Installs the allocator; a later call changes its options. Thread-safe, provided that no thread
/// creates tensors during the first call. If the arena or the system is out of memory, new tensors
/// are private. A forked child allocates privately until it calls this itself. Throws DistError if
/// the arena cannot be created or another library's allocator has a higher priority.
void use_shared_allocator(const SharedAllocatorOptions& options = {});

struct SharedAllocatorStats {
  bool enabled = false;
  std::size_t bytes_in_use = 0;  ///< of tensors in the arena, including `empty_shared`
  /// Memory the arena holds: in use, kept for later, or quarantined.
  std::size_t bytes_reserved = 0;
  /// Memory of freed tensors that a peer may still write to, because the peer was stopped (SIGSTOP)
  /// inside a call that failed. Released when tensors are made or freed after every such peer has
  /// continued or exited.
  std::size_t bytes_quarantined = 0;
  std::size_t limit = 0;             ///< limit of bytes_reserved
  std::uint64_t bytes_returned = 0;  ///< returned to the system so far
  std::uint64_t allocations = 0;     ///< in the arena, so far
  /// Tensors above `private_up_to` that became private so far because the arena was full.
  std::uint64_t fallbacks = 0;
};
SharedAllocatorStats shared_allocator_stats();
/// Returns the memory kept for later tensors to the system.
void trim_shared_allocator();

/// Like at::empty on the CPU: uninitialised and contiguous, in the process's arena. The tensor
/// behaves like any other. resize_() to a larger size moves it to other memory; it is freed with
/// its last reference. Throws DistError (Code::exhausted) at the arena's limit.
at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options = {});

/// Whether the tensor's memory is in the arena, from `empty_shared` or the shared allocator, so
/// that other ranks of the host can access it directly.
bool in_shared_memory(const at::Tensor& tensor);

}  // namespace muster
