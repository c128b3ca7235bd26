/// Puts every CPU tensor into shared memory: replaces torch's CPU allocator by one that allocates
/// from the process's arena (`shm/arena.h`), which the other ranks of the host map. Collectives on
/// ordinary tensors then need no copies, as on tensors from `empty_shared`.
/// docs/user/shared-memory.md gives benefits, costs and risks.
///
/// It applies to the whole process, before, during and after any job. Tensors made earlier and
/// memory torch got elsewhere (from_numpy, from_blob, mapped files) stay where they are; calls on
/// them copy as before and give the same results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

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
  /// Memory of freed tensors that a peer stopped inside a failed call may still write to. Released
  /// when tensors are made or freed after every such peer has continued or exited.
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

namespace group {
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
}  // namespace group

}  // namespace muster
