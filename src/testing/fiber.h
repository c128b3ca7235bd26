// SPDX-License-Identifier: BSD-3-Clause
/// Stacks to switch between within one thread, so that a simulated rank may block in the middle of
/// real code. Sanitizers are told about every switch.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace muster::testing {

class Fiber {
 public:
  explicit Fiber(std::function<void()> body);
  /// An unfinished fiber is abandoned as a killed process is: nothing unwinds, its stack and what
  /// hangs on it stay where they are.
  ~Fiber();

  /// Runs the fiber until it yields or ends. Not from within a fiber. True once it has ended.
  bool resume();
  bool done() const;
  /// Gives the thread back to the caller of the running fiber's `resume`.
  static void yield();
  /// The fiber that runs now, or null.
  static Fiber* current();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster::testing
