// SPDX-License-Identifier: BSD-3-Clause
/// Test support: a host region over memory of either kind, and bodies that run in a forked child.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "core/shm/region_memory.h"
#include "core/shm/shared_mapping.h"

namespace muster::shm {

inline RegionShape shape_of(int ranks, std::size_t ring_bytes = 4096,
                            std::size_t segment_bytes = std::size_t{1} << 26) {
  RegionShape shape;
  for (int rank = 0; rank < ranks; ++rank) shape.ranks.push_back(rank);
  shape.ring_bytes = ring_bytes;
  shape.segment_bytes = segment_bytes;
  return shape;
}

/// A region in each kind of memory: mapped by peer processes, and shared by threads.
struct TestRegion {
  explicit TestRegion(const RegionShape& with, bool memory_file) : shape(with) {
    const std::size_t bytes = region_bytes(shape);
    if (memory_file) {
      file = std::move(*make_memory_file("muster-test-region", bytes));
      auto mapping = std::move(*map_shared(file.get(), bytes));
      memory = mapping->memory();
      owner = mapping;
    } else {
      void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      memory = static_cast<std::byte*>(mapped);
      owner = std::shared_ptr<void>(mapped, [bytes](void* at) { ::munmap(at, bytes); });
    }
    lay_out_region(memory, shape);
  }
  std::unique_ptr<HostRegion> open(int local_rank) {
    return std::move(*open_region(memory, shape, local_rank, owner));
  }

  RegionShape shape;
  Descriptor file;
  std::byte* memory = nullptr;
  std::shared_ptr<void> owner;
};

inline std::byte pattern(std::uint64_t at) {
  return static_cast<std::byte>((at * 131) ^ (at >> 8) ^ (at >> 16));
}

/// Runs `body` in a forked child; its exit code is 0 if it returned true.
template <class Body>
pid_t in_child(Body body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  return child;
}

}  // namespace muster::shm
