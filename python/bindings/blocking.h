// SPDX-License-Identifier: BSD-3-Clause
/// Calls that may block: they release the GIL and can be interrupted by Ctrl-C.
///
/// Python runs its handlers on the main thread between two instructions of its own, so never while
/// that thread is inside muster. If SIGINT has Python's own handler (`KeyboardInterrupt`), muster
/// therefore installs a handler in front of it. That handler wakes a thread, which aborts the
/// operation in which the main thread waits; the other ranks get an error that names this one.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "core/base/process/interruption.h"
#include "core/group/world.h"
#include "muster/process_group.h"
#include "muster/work.h"

namespace muster::python {

/// Installs the handler, on the main thread and only in front of Python's own. Called at import and
/// when a job begins. Afterwards every call of the main thread checks that it is still installed.
void watch_for_interrupts();

/// Whether the main thread is in a call that Ctrl-C interrupts.
bool main_thread_is_interruptible();

/// While it lives, Ctrl-C calls its interrupt function, if it was created on the main thread; on
/// other threads it does nothing. Create and destroy it with the GIL held.
class Interruptible {
 public:
  /// Throws if Ctrl-C has been pressed already.
  explicit Interruptible(std::function<void()> interrupt);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  bool active_ = false;
  std::function<void()>
      before_;  // a call may be within another: a backward pass calls hooks of the user's
};

template <class Call>
auto without_gil(std::function<void()> interrupt, Call call) {
  const Interruptible interruptible(std::move(interrupt));
  try {
    const pybind11::gil_scoped_release released;
    return call();
  } catch (...) {
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    throw;
  }
}

/// A started operation as Python sees it. Ctrl-C in its `wait` aborts the operation's group.
struct GroupWork {
  WorkRef work;
  std::weak_ptr<ProcessGroup> group;
};

/// `group`, the default one for null; null where there is none.
Group acting(const Group& group);
/// Aborts the group's pending operations and tells the other members why. Does nothing for null.
void interrupt(const Group& group);

/// `call()` on `group` (null: the default one). Its Work, if it has one, comes as Python has it.
template <class Call>
auto blocking(const Group& group, Call call) {
  const auto end = [group] { interrupt(acting(group)); };
  if constexpr (std::is_same_v<std::invoke_result_t<Call&>, WorkRef>) {
    auto work = without_gil(end, std::move(call));
    return work ? std::make_shared<GroupWork>(GroupWork{std::move(work), acting(group)}) : nullptr;
  } else {
    return without_gil(end, std::move(call));
  }
}

/// `call()` that waits in a store.
template <class Call>
auto blocking_on_store(Call call) {
  const auto interruption = std::make_shared<Interruption>();
  return without_gil([interruption] { interruption->raise("interrupted (SIGINT)"); },
                     [&] {
                       const Interruption::InterruptionBinding bound(interruption);
                       return call();
                     });
}

}  // namespace muster::python
