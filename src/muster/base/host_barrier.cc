#include "muster/base/host_barrier.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace muster {
namespace {

#if defined(__SANITIZE_THREAD__)
bool register_here() { return false; }
#else
bool barrier_call(int command) { return ::syscall(SYS_membarrier, command, 0, 0) == 0; }

bool register_here() { return barrier_call(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) && barrier_call(MEMBARRIER_CMD_GLOBAL_EXPEDITED); }
#endif

}  // namespace

bool takes_host_barriers() noexcept {
  static const bool taken = register_here();
  return taken;
}

void send_host_barrier() noexcept {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_seq_cst);
  barrier_call(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
#endif
}

}  // namespace muster
