/// Starting threads of the engine: a thread that the system refuses is a Status and no exception.
#pragma once

#include <functional>
#include <string_view>
#include <thread>

#include "muster/status.h"

namespace muster {

/// Who takes the signals that reach a thread.
enum class Signals : bool {
  blocked,    ///< the program's other threads: the new thread runs no signal handler
  inherited,  ///< as in the thread that starts it
};

/// Runs `body`, which must not throw, on a new thread. Code::exhausted names `what` where the
/// system gives no thread; nothing is changed then, the caller's signal mask included.
Result<std::thread> start_thread(std::string_view what, std::function<void()> body,
                                 Signals signals = Signals::blocked);

/// While it lives, `start_thread` is refused on every thread of the process. For tests.
class NoNewThreads {
 public:
  NoNewThreads();
  ~NoNewThreads();
  NoNewThreads(const NoNewThreads&) = delete;
  NoNewThreads& operator=(const NoNewThreads&) = delete;
};

}  // namespace muster
