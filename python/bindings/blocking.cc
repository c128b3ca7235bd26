// SPDX-License-Identifier: BSD-3-Clause
#include "blocking.h"

#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"

namespace muster::python {
namespace {

/// State that the signal handler may access. It reads `wake_process` first, which is set last: so
/// the descriptor is that of this process.
std::atomic<int> wake_descriptor{-1};
std::atomic<pid_t> wake_process{
    0};  // a fork has the descriptor too, and its interrupts are not this process's
std::atomic<void (*)(int)> next_handler{nullptr};

void on_interrupt(int signal) {
  const int before = errno;
  const std::uint64_t one = 1;
  if (wake_process.load() == ::getpid())
    static_cast<void>(!::write(wake_descriptor.load(), &one, sizeof one));
  errno = before;
  if (auto* next = next_handler.load()) next(signal);
}

/// `mutex` guards it. The watching thread copies `interrupt` and calls it without the lock.
struct MainThreadWait {
  std::mutex mutex;
  std::function<void()> interrupt;  // of the main thread's call, while there is one
  pid_t watched = 0;                // the process whose thread looks: a fork has no threads
};
MainThreadWait& waiting() {
  static auto* state = new MainThreadWait;  // the thread may outlive everything else
  return *state;
}

bool on_main_thread() {
  thread_local const bool is_main = ::syscall(SYS_gettid) == ::getpid();
  return is_main;
}

/// Only a count that was read says that SIGINT came: a read that another signal has ended says
/// nothing.
void look(int descriptor) {
  for (std::uint64_t count = 0;;) {
    const ssize_t got = ::read(descriptor, &count, sizeof count);
    if (got < 0 && errno == EINTR) continue;
    if (got != sizeof count) return;
    std::function<void()> interrupt;
    {
      const std::lock_guard lock(waiting().mutex);
      interrupt = waiting().interrupt;
    }
    if (interrupt) interrupt();
  }
}

bool has_python_handler() {
  static const auto& signal = *new pybind11::module_(pybind11::module_::import("signal"));
  static const auto& default_handler = *new pybind11::object(signal.attr("default_int_handler"));
  return signal.attr("getsignal")(SIGINT).is(default_handler);
}

}  // namespace

void watch_for_interrupts() {
  if (!on_main_thread() || !has_python_handler()) return;
  auto& state = waiting();
  const std::lock_guard lock(state.mutex);
  if (state.watched != ::getpid()) {
    const int descriptor = ::eventfd(0, EFD_CLOEXEC);
    if (descriptor < 0) return;
    auto thread =
        start_thread("the thread that watches for Ctrl-C", [descriptor] { look(descriptor); });
    if (!thread.ok()) {  // Ctrl-C then interrupts only what Python itself waits for
      ::close(descriptor);
      log(LogLevel::warning, thread.status().message());
      return;
    }
    thread->detach();
    wake_descriptor = descriptor;
    wake_process = state.watched = ::getpid();
    state.interrupt = nullptr;
  }
  struct sigaction action {};
  if (::sigaction(SIGINT, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0 ||
      action.sa_handler == on_interrupt || action.sa_handler == SIG_IGN ||
      action.sa_handler == SIG_DFL)  // set by C code, unseen by Python
    return;
  next_handler = action.sa_handler;
  action.sa_handler = on_interrupt;
  ::sigaction(SIGINT, &action, nullptr);
}

/// Reinstalls the handler: a program that sets Python's handler again (notebooks do before every
/// cell) has replaced it.
void stay_in_front() {
  if (wake_process.load() == 0) return;  // the handler was never installed
  struct sigaction action {};
  if (::sigaction(SIGINT, nullptr, &action) == 0 && action.sa_handler != on_interrupt)
    watch_for_interrupts();
}

bool main_thread_is_interruptible() {
  auto& state = waiting();
  const std::lock_guard lock(state.mutex);
  return state.interrupt != nullptr;
}

Group acting(const Group& group) {
  if (group) return group;
  const auto scope = World::hold_current();
  return scope->initialized() ? scope->world("an interrupt") : nullptr;
}

void interrupt(const Group& group) {
  if (group && group->is_member()) core_of(group).abort("interrupted (SIGINT)");
}

Interruptible::Interruptible(std::function<void()> interrupt) {
  if (!on_main_thread()) return;
  stay_in_front();
  {
    const std::lock_guard lock(waiting().mutex);
    before_ = std::exchange(waiting().interrupt, std::move(interrupt));
  }
  active_ = true;
  // An earlier SIGINT is pending in Python; a later one finds the operation to interrupt.
  if (PyErr_CheckSignals() != 0) {
    const std::lock_guard lock(waiting().mutex);
    waiting().interrupt.swap(before_);
    throw pybind11::error_already_set();
  }
}

Interruptible::~Interruptible() {
  if (!active_) return;
  const std::lock_guard lock(waiting().mutex);
  before_.swap(waiting().interrupt);
}

}  // namespace muster::python
