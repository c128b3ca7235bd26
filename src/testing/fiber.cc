// SPDX-License-Identifier: BSD-3-Clause
#include "testing/fiber.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace muster::testing {
namespace {
constexpr std::size_t kStackBytes = std::size_t{1} << 20;
thread_local Fiber* running = nullptr;
}  // namespace

struct Fiber::State {
  std::function<void()> body;
  ucontext_t own{};
  ucontext_t back{};
  void* stack = nullptr;
  bool done = false;
#if defined(__SANITIZE_ADDRESS__)
  void* own_fake = nullptr;
  void* back_fake = nullptr;
  const void* back_bottom = nullptr;
  std::size_t back_size = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* own_tsan = nullptr;
  void* back_tsan = nullptr;
#endif

  void switch_in() {
#if defined(__SANITIZE_THREAD__)
    back_tsan = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(own_tsan, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&back_fake, stack, kStackBytes);
#endif
    swapcontext(&back, &own);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(back_fake, nullptr, nullptr);
#endif
  }

  void switch_out() {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(back_tsan, 0);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(done ? nullptr : &own_fake, back_bottom, back_size);
#endif
    swapcontext(&own, &back);
    entered();
  }

  void entered() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(own_fake, &back_bottom, &back_size);
#endif
  }

  static void main(unsigned low, unsigned high) {
    auto* self = reinterpret_cast<State*>((static_cast<std::uintptr_t>(high) << 32) | low);
    self->entered();
    self->body();
    self->done = true;
    self->switch_out();
    std::abort();  // a finished fiber is never entered again
  }
};

Fiber::Fiber(std::function<void()> body) : state_(std::make_unique<State>()) {
  state_->body = std::move(body);
  state_->stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (state_->stack == MAP_FAILED) std::abort();
  getcontext(&state_->own);
  state_->own.uc_stack.ss_sp = state_->stack;
  state_->own.uc_stack.ss_size = kStackBytes;
  state_->own.uc_link = nullptr;
  const auto self = reinterpret_cast<std::uintptr_t>(state_.get());
  makecontext(&state_->own, reinterpret_cast<void (*)()>(&State::main), 2,
              static_cast<unsigned>(self), static_cast<unsigned>(self >> 32));
#if defined(__SANITIZE_THREAD__)
  state_->own_tsan = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
  if (!state_->done) {
    static_cast<void>(state_.release());  // its own stack may point to it
    return;
  }
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(state_->own_tsan);
#endif
  munmap(state_->stack, kStackBytes);
}

bool Fiber::resume() {
  Fiber* const before = running;
  running = this;
  state_->switch_in();
  running = before;
  return state_->done;
}

bool Fiber::done() const { return state_->done; }

void Fiber::yield() { running->state_->switch_out(); }

Fiber* Fiber::current() { return running; }

}  // namespace muster::testing
