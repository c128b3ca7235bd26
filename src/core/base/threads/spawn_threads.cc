#include "core/base/threads/spawn_threads.h"

#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/threads/thread_start.h"

namespace muster {

Status spawn_threads(int n, const std::function<Status(int rank)>& body, const ThreadHooks& hooks) {
  if (n < 1)
    return Status(Code::invalid_argument,
                  "cannot spawn " + std::to_string(n) + " threads: at least 1 is needed");
  std::mutex mutex;
  Status first;
  const auto note = [&](int rank, Status failure) {
    const std::lock_guard lock(mutex);
    if (!first) return;
    first = std::move(failure);
    if (hooks.on_first_failure) hooks.on_first_failure(rank, first);
  };
  const auto run = [&](int rank) {
    const Status said = [&] {
      const ProgramSignals programs;  // it is the user's code
      return body(rank);
    }();
    if (!said)
      note(rank, Status(said.code(),
                        "rank " + std::to_string(rank) + " (a thread) failed: " + said.message(),
                        said.ranks().empty() ? std::vector{rank} : said.ranks()));
    if (hooks.at_end) hooks.at_end(rank);
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(n));
  for (int rank = 0; rank < n; ++rank) {
    auto thread =
        start_thread("the thread of rank " + std::to_string(rank), [&, rank] { run(rank); });
    if (!thread) {
      note(rank, Status(thread.status().code(), thread.status().message(), {rank}));
      break;
    }
    threads.push_back(std::move(*thread));
  }
  for (std::thread& thread : threads) thread.join();
  return first;
}

}  // namespace muster
