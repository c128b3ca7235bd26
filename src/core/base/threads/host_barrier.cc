// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/threads/host_barrier.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "core/base/descriptor.h"
#include "core/base/log/log.h"

namespace muster {
namespace {

#if defined(__SANITIZE_THREAD__)
bool register_here() { return false; }
#else
bool barrier_call(int command) { return ::syscall(SYS_membarrier, command, 0, 0) == 0; }

bool register_here() {
  return barrier_call(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) &&
         barrier_call(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
}
#endif

}  // namespace

bool takes_host_barriers() noexcept {
  static const bool taken = register_here();
  return taken;
}

void send_host_barrier() noexcept {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!takes_host_barriers()) return;  // then no thread relies on them
  if (barrier_call(MEMBARRIER_CMD_GLOBAL_EXPEDITED)) return;
  const std::string why = errno_text(errno);
  if (barrier_call(MEMBARRIER_CMD_GLOBAL)) return;  // slower, but reaches every thread too
  static std::atomic<bool> said{false};
  if (!said.exchange(true))
    log(LogLevel::error,
        "the system no longer sends barriers to all processors (membarrier), which it did when "
        "this process began: " +
            why +
            "; threads may meet in what only one of them should be in, and sleepers may wake up "
            "100 ms late");
#endif
}

}  // namespace muster
