// SPDX-License-Identifier: BSD-3-Clause
/// The parts of the shared allocator that muster's own layers use.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "muster/shared_memory.h"

namespace muster::group {

/// Enables the shared allocator if `wanted` is true, or if `wanted` is empty and
/// MUSTER_SHARE_MEMORY is true. Throws DistError if the variable is neither true nor false.
void share_memory_if_asked(std::optional<bool> wanted);

/// Places the tensors of given sizes that one thread creates in shared memory, whether or not the
/// shared allocator is enabled. A library uses it for tensors that torch allocates and that will be
/// passed to collectives. Other tensors are unaffected. MUSTER_SHARE_MEMORY=0 disables it. It
/// installs the allocator for the whole process, so no other thread should create tensors
/// meanwhile, as for `use_shared_allocator`. While the object lives, freed memory of such tensors
/// is kept for later ones, in addition to `SharedAllocatorOptions::keep`.
class SharedSizes {
 public:
  /// `bytes` lists the size of each such tensor. Sizes up to 16 KiB are ignored.
  explicit SharedSizes(std::vector<std::size_t> bytes);
  ~SharedSizes();
  SharedSizes(const SharedSizes&) = delete;
  SharedSizes& operator=(const SharedSizes&) = delete;
  /// Starts for the calling thread, in addition to other SharedSizes started there; stops for any
  /// other thread.
  void begin();
  /// Stops. May be called on any thread.
  void end() noexcept;

  struct Wanted;

 private:
  std::shared_ptr<Wanted> wanted_;  ///< null: disabled, or no size is large enough
  std::size_t kept_ = 0;            ///< bytes the arena keeps for these tensors
};

}  // namespace muster::group
