// SPDX-License-Identifier: BSD-3-Clause
// Checks the order of Python's interpreter lock (GIL) and the locks of this library, in the build
// of the extension that the tests of hooks and callbacks use (`muster_python_checked`):
//
//   1. a thread that holds one of our locks does not wait for the GIL, so nothing of Python runs
//      under a lock of ours;
//   2. a thread that holds the GIL waits for no lock of ours that is not free at once or soon, and
//      for no thread's end. So what is held for long is taken without the GIL.
//
// Either rule alone excludes a deadlock between the two kinds of lock. Both are checked because
// torch takes the GIL by itself, unseen by this file: for example when the last C++ owner of a
// tensor goes that Python has seen. The first is checked at every entry of Python. The second ends
// what hangs: a holder that runs a few instructions is done within kPatience on any machine.
//
// The linker replaces each of the functions below, wherever our object files refer to it, by its
// `__wrap_` (`--wrap`). So neither our sources nor other libraries change. A violation prints the
// stack and aborts.
#include <Python.h>
#include <execinfo.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

namespace {

thread_local int locks_held = 0;
/// Whether a call has released the GIL yet. Until then the extension is being loaded, and there are
/// no threads of ours.
std::atomic<bool> loaded{false};

/// Recursive ones are the locks of objects that one thread uses at a time, under which the user's
/// hooks may call the object again (a unit of FSDP). Only rule 2 is checked for them.
bool counts(const pthread_mutex_t* mutex) {
  return (mutex->__data.__kind & 3) != PTHREAD_MUTEX_RECURSIVE_NP;
}

[[noreturn]] void stop(const char* what) {
  void* frames[64];
  static_cast<void>(!::write(STDERR_FILENO, what, std::strlen(what)));
  ::backtrace_symbols_fd(frames, ::backtrace(frames, 64), STDERR_FILENO);
  std::abort();
}

constexpr time_t kPatience = 60;  // seconds

bool holds_gil() { return loaded.load() && Py_IsInitialized() != 0 && PyGILState_Check() != 0; }

constexpr char kWaits[] =
    "muster: a thread that holds Python's GIL waits for a lock or a thread of muster:\n";

/// Takes a lock by `lock`; with the GIL by `lock_until`, which gives up.
template <class Lock, class LockUntil>
int take(const Lock& lock, const LockUntil& lock_until) {
  if (!holds_gil()) return lock();
  timespec until{};
  ::clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += kPatience;
  const int result = lock_until(CLOCK_MONOTONIC, &until);
  if (result == ETIMEDOUT) stop(kWaits);
  return result;
}

void before_python() {
  if (locks_held != 0) stop("muster: a thread that holds a lock of muster waits for the GIL:\n");
}

/// `result`: of the call that takes the lock; 0: taken.
int taken(int result) {
  if (result == 0) ++locks_held;
  return result;
}

int released(int result) {
  if (result == 0) --locks_held;
  return result;
}

}  // namespace

extern "C" {

/// For the check's own test: breaks rule 2 if the caller holds the GIL, else rule 1.
[[gnu::visibility("default")]] void muster_break_lock_order() {
  loaded = true;
  if (holds_gil()) std::thread([] {}).join();
  std::mutex mutex;
  const std::lock_guard lock(mutex);
  PyGILState_Release(PyGILState_Ensure());
}

int __real_pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* until);
int __wrap_pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  const int result = __real_pthread_mutex_clocklock(mutex, clock, until);
  return counts(mutex) ? taken(result) : result;
}
int __real_pthread_mutex_lock(pthread_mutex_t* mutex);
int __wrap_pthread_mutex_lock(pthread_mutex_t* mutex) {
  const int result = take([&] { return __real_pthread_mutex_lock(mutex); },
                          [&](clockid_t clock, const timespec* until) {
                            return __real_pthread_mutex_clocklock(mutex, clock, until);
                          });
  return counts(mutex) ? taken(result) : result;
}
int __real_pthread_mutex_trylock(pthread_mutex_t* mutex);
int __wrap_pthread_mutex_trylock(pthread_mutex_t* mutex) {
  const int result = __real_pthread_mutex_trylock(mutex);
  return counts(mutex) ? taken(result) : result;
}
int __real_pthread_mutex_unlock(pthread_mutex_t* mutex);
int __wrap_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  const bool counted = counts(mutex);
  const int result = __real_pthread_mutex_unlock(mutex);
  return counted ? released(result) : result;
}

int __real_pthread_rwlock_rdlock(pthread_rwlock_t* lock);
int __wrap_pthread_rwlock_rdlock(pthread_rwlock_t* lock) {
  return taken(take([&] { return __real_pthread_rwlock_rdlock(lock); },
                    [&](clockid_t clock, const timespec* until) {
                      return ::pthread_rwlock_clockrdlock(lock, clock, until);
                    }));
}
int __real_pthread_rwlock_wrlock(pthread_rwlock_t* lock);
int __wrap_pthread_rwlock_wrlock(pthread_rwlock_t* lock) {
  return taken(take([&] { return __real_pthread_rwlock_wrlock(lock); },
                    [&](clockid_t clock, const timespec* until) {
                      return ::pthread_rwlock_clockwrlock(lock, clock, until);
                    }));
}
int __real_pthread_rwlock_unlock(pthread_rwlock_t* lock);
int __wrap_pthread_rwlock_unlock(pthread_rwlock_t* lock) {
  return released(__real_pthread_rwlock_unlock(lock));
}

// std::thread::join
void __real__ZNSt6thread4joinEv(std::thread* thread);
void __wrap__ZNSt6thread4joinEv(std::thread* thread) {
  if (holds_gil()) stop(kWaits);
  __real__ZNSt6thread4joinEv(thread);
}

PyGILState_STATE __real_PyGILState_Ensure();
PyGILState_STATE __wrap_PyGILState_Ensure() {
  before_python();
  return __real_PyGILState_Ensure();
}
void __real_PyEval_AcquireThread(PyThreadState* state);
void __wrap_PyEval_AcquireThread(PyThreadState* state) {
  before_python();
  __real_PyEval_AcquireThread(state);
}
void __real_PyEval_RestoreThread(PyThreadState* state);
void __wrap_PyEval_RestoreThread(PyThreadState* state) {
  before_python();
  loaded = true;
  __real_PyEval_RestoreThread(state);
}

}  // extern "C"
