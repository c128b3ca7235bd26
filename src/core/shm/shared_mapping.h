// SPDX-License-Identifier: BSD-3-Clause
/// Memory files (memfd) and their mappings. Ranks that are threads of one process open the same
/// file several times; they share ONE mapping, so an address means the same to all of them.
#pragma once

#include <cstddef>
#include <memory>

#include "core/base/descriptor.h"
#include "core/base/process/fork_guard.h"
#include "muster/status.h"

namespace muster::shm {

/// Creates a memory file of `bytes`: sparse, close-on-exec, sealed against shrinking (no peer can
/// make our mapping fault) and against further seals.
Result<Descriptor> make_memory_file(const char* name, std::size_t bytes);

class SharedMapping {
 public:
  SharedMapping(std::byte* memory, std::size_t bytes) : memory_(memory), bytes_(bytes) {}
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;
  ~SharedMapping();

  std::byte* memory() const { return memory_; }
  std::size_t bytes() const { return bytes_; }
  /// True in a forked child of the process that made it: its contents may be a private copy by now.
  bool forked() const { return mark_.forked(); }

 private:
  std::byte* memory_;
  std::size_t bytes_;
  ProcessMark mark_;
};

/// The process's mapping of the whole file behind `descriptor`; created if there is none. It is
/// read-only if the descriptor that creates it is. Code::refused if the file is smaller than
/// `at_least` or could be shrunk (it must be a memory file with the seal). Thread-safe.
Result<std::shared_ptr<SharedMapping>> map_shared(int descriptor, std::size_t at_least);

}  // namespace muster::shm
