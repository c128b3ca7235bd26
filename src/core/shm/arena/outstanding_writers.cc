#include "core/shm/arena/outstanding_writers.h"

namespace muster::shm {

bool OutstandingWriters::operator()() {
  std::erase_if(peers_, [](const WriterPeer& peer) {
    return reached(
               peer.progress->counters[static_cast<int>(peer.done)].load(std::memory_order_acquire),
               peer.end) ||
           peer.progress->aborted.load(std::memory_order_acquire) != 0 ||
           (peer.process != nullptr && peer.process->seen());
  });
  return !peers_.empty();
}

}  // namespace muster::shm
