/// Every tensor shared: torch's CPU allocator, replaced by one that takes memory from the process's
/// arena (`shm/arena.h`), which the other ranks of the host map. Collectives on ordinary
/// tensors then need no copying in and out, as on those of `empty_shared`. What it gives, what it
/// costs and what is unsafe is told in docs/user/shared-memory.md.
///
/// For the whole process, whatever jobs it is in, before, during and after them. Tensors made
/// before, and memory that torch got elsewhere (from_numpy, from_blob, mapped files), stay where
/// they are, and calls on them copy as always; the results are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace muster {

struct SharedAllocatorOptions {
  bool enabled = true;  ///< false: what is made from now on is private again
  std::size_t private_up_to =
      16 * 1024;  ///< bytes; smaller tensors stay private, since calls on them copy anyway
  std::optional<std::size_t> limit =
      {};  ///< bytes of the arena; absent: the machine's memory, or the control group's
  std::size_t keep = std::size_t{256} << 20;  ///< bytes of freed memory that stay for later
                                              ///< tensors; what is more goes back to the system
  /// The other ranks may read this process's tensors, not write to them: all_reduce and reduce copy
  /// results out, every other call is as fast. For good; those that have mapped the arena before
  /// could still write.
  bool read_only = false;
};

/// Thread-safe where no thread makes tensors at the time of the first call; a later call changes
/// the options. Where the arena has no room, or the system no memory, tensors are private. A forked
/// child allocates privately, until it calls this itself. Throws DistError where the arena cannot
/// be made or another library has put its allocator above.
void use_shared_allocator(const SharedAllocatorOptions& options = {});

struct SharedAllocatorStats {
  bool enabled = false;
  std::size_t bytes_in_use = 0;  ///< of tensors in the arena, `empty_shared`'s too
  std::size_t bytes_reserved =
      0;  ///< memory that the arena has of the system: in use, kept for later, or quarantined
  /// Of tensors that are gone, but that a peer which is stopped in a call that failed may still
  /// write to. Looked at whenever tensors are made or freed: no part of it any more once every such
  /// peer has gone on or its process has ended.
  std::size_t bytes_quarantined = 0;
  std::size_t limit = 0;             ///< of bytes_reserved
  std::uint64_t bytes_returned = 0;  ///< to the system, so far
  std::uint64_t allocations = 0;     ///< in the arena, so far
  std::uint64_t fallbacks =
      0;  ///< tensors above `private_up_to` that became private since the arena had no room, so far
};
SharedAllocatorStats shared_allocator_stats();
/// Gives what is kept for later tensors back to the system.
void trim_shared_allocator();

namespace group {
/// `wanted`, or where it is absent MUSTER_SHARE_MEMORY: turns the shared allocator on where it is
/// not. Throws DistError where the variable says neither yes nor no.
void share_memory_if_asked(std::optional<bool> wanted);

/// Tensors of certain sizes that a thread makes for a while, in shared memory, whether the shared
/// allocator is enabled or not: what a library knows that it will give to collectives, though torch
/// makes it. All others stay where they were. MUSTER_SHARE_MEMORY=0 switches it off. It installs
/// the allocator, so tensors of the whole process are made and freed through it from then on; as
/// for `use_shared_allocator`, no other thread should make tensors at that time. What a process
/// frees of such tensors is kept for later ones, beyond `SharedAllocatorOptions::keep`, while this
/// lives.
class SharedSizes {
 public:
  /// `bytes` of each tensor, as often as there are such; what is not above 16 KiB is left out.
  explicit SharedSizes(std::vector<std::size_t> bytes);
  ~SharedSizes();
  SharedSizes(const SharedSizes&) = delete;
  SharedSizes& operator=(const SharedSizes&) = delete;
  /// For the calling thread, besides what others began there, and on no other from then on.
  void begin();
  /// On any thread.
  void end() noexcept;

  struct Wanted;

 private:
  std::shared_ptr<Wanted> wanted_;  ///< null: switched off, or nothing is large enough
  std::size_t kept_ = 0;            ///< bytes that the arena keeps for them
};
}  // namespace group

}  // namespace muster
