// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/time/task.h"

#include <array>
#include <new>

namespace muster::task_detail {
namespace {

// Frames are cut to multiples of 64 bytes up to 8 KiB; larger ones go to the heap. A frame holds
// those of the tasks that it awaits where the compiler sees both, so which size a task has depends
// on what is compiled together.
constexpr std::size_t kGrain = 64;  // limit: a cache line
constexpr std::size_t kClasses = 128;
constexpr int kKeptPerClass = 32;  // limit: memory

struct FreeFrame {
  FreeFrame* next;
};

struct Pool {
  std::array<FreeFrame*, kClasses> head{};
  std::array<int, kClasses> kept{};
  ~Pool() {
    for (FreeFrame*& list : head) {
      while (list != nullptr) {
        FreeFrame* next = list->next;
        ::operator delete(list);
        list = next;
      }
    }
    kept.fill(kKeptPerClass);  // frames that outlive the thread's pool go straight to the heap
  }
};

thread_local Pool pool;

}  // namespace

Status thread_ended() {
  return {Code::aborted, "the thread that was in it has been ended (pthread_cancel, pthread_exit)"};
}

void* allocate_frame(std::size_t bytes) {
  const std::size_t index = (bytes + kGrain - 1) / kGrain - 1;
  if (index >= kClasses) return ::operator new(bytes);
  if (FreeFrame* frame = pool.head[index]) {
    pool.head[index] = frame->next;
    --pool.kept[index];
    return frame;
  }
  return ::operator new((index + 1) * kGrain);
}

void free_frame(void* frame, std::size_t bytes) noexcept {
  const std::size_t index = (bytes + kGrain - 1) / kGrain - 1;
  if (index >= kClasses || pool.kept[index] >= kKeptPerClass) {
    ::operator delete(frame);
    return;
  }
  auto* free = static_cast<FreeFrame*>(frame);
  free->next = pool.head[index];
  pool.head[index] = free;
  ++pool.kept[index];
}

}  // namespace muster::task_detail
