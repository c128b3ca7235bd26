// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/slice_list.h"

#include <array>
#include <new>
#include <utility>

namespace muster::collective::slice_list_detail {
namespace {

/// Size of a list's first allocation.
constexpr std::size_t kLeastBytes = 1024;  // limit: the slices of 64 members

struct Spare {
  void* memory = nullptr;
  std::size_t bytes = 0;
};
/// A call has two sides.
constinit thread_local std::array<Spare, 2> spares{};
/// Lists in global objects outlive the thread's own objects at process exit.
constinit thread_local bool destroyed = false;
struct Owner {
  ~Owner() {
    destroyed = true;
    for (Spare& spare : spares) ::operator delete(std::exchange(spare, {}).memory);
  }
  bool used = false;
};
thread_local Owner owner;

}  // namespace

void* acquire_memory(std::size_t& bytes) {
  for (Spare& spare : spares) {
    if (spare.bytes < bytes) continue;
    bytes = spare.bytes;
    return std::exchange(spare, {}).memory;
  }
  bytes = std::max(bytes, kLeastBytes);
  return ::operator new(bytes);
}

void release_memory(void* memory, std::size_t bytes) noexcept {
  if (!destroyed) {
    owner.used = true;  // constructs it, so that it is destroyed with the thread
    Spare& smaller = spares[0].bytes <= spares[1].bytes ? spares[0] : spares[1];
    if (smaller.bytes < bytes) memory = std::exchange(smaller, {memory, bytes}).memory;
  }
  ::operator delete(memory);
}

}  // namespace muster::collective::slice_list_detail
