#include "core/collective/region/quiescence.h"

#include <cstddef>
#include <exception>
#include <string>
#include <utility>

#include "core/base/log/log.h"
#include "core/collective/region/call_failure.h"
#include "core/shm/arena/quarantine.h"
#include "core/transport/fabric.h"

namespace muster::collective::region {

using shm::Counter;

/// Whether each peer (or `only`) has finished its part, has aborted, is dead, or has not begun. A
/// peer that begins later sees the abort first: `publish` and `abort` both have a full fence
/// between their store and their load, or `abort` sends a barrier to all processors.
bool Quiescence::quiesced(Counter done, int only) const {
  for (int member = 0; member < segment_.size(); ++member) {
    if (member == segment_.rank() || (only >= 0 && member != only)) continue;
    if (!segment_.has_begun(member)) continue;
    if (shm::reached(segment_.counter(member, done), segment_.at_end())) continue;
    if (segment_.progress(member).aborted.load(std::memory_order_acquire) != 0) continue;
    if (!channel_.fabric().death_of(job_rank(channel_, member)).ok()) continue;
    return false;
  }
  return true;
}

Task<> Quiescence::quiesce(Counter done, int only) {
  const Clock& clock = channel_.fabric().clock();
  const auto progress = [&] {
    shm::Position all = 0;
    for (int member = 0; member < segment_.size(); ++member) all += segment_.counter(member, done);
    return all;
  };
  shm::Position seen = progress();
  TimePoint limit = clock.now() + kQuiesceLimit;
  co_await until([&] {
    if (const shm::Position now = progress(); now != seen) {
      seen = now;
      limit = clock.now() + kQuiesceLimit;
    }
    return quiesced(done, only) || clock.now() >= limit;
  });
  co_return Status();
}

Task<> Quiescence::quiesce_exposed() {
  if (exposed_ == Exposed::output) co_return co_await quiesce(Counter::reduced);
  if (exposed_ == Exposed::inputs) co_return co_await quiesce(Counter::drained);
  co_return Status();
}

void Quiescence::quarantine(const Args& args) noexcept try {
  if (exposed_ == Exposed::output) quarantine(args.outputs[0], Counter::reduced, -1);
  if (exposed_ != Exposed::inputs) return;
  const shm::ReaderSlice* const table = segment_.table(segment_.rank());
  for (int reader = 0; reader < segment_.size(); ++reader) {
    if (table[reader].granted)
      quarantine(args.inputs[static_cast<std::size_t>(reader)], Counter::drained, reader);
  }
} catch (const std::exception& error) {
  log(LogLevel::error,
      std::string("cannot quarantine memory that a failed call has exposed to peers: ") +
          error.what());
}

// Unlike `quiesced`, this counts a peer as dead only if its process has ended: a silent peer may
// just be stopped.
void Quiescence::quarantine(ConstBytes memory, Counter done, int only) {
  shm::Arena* const arena = arena_();
  if (arena == nullptr) return;
  shm::OutstandingWriters writers(peers_.memory());
  for (int member = 0; member < segment_.size(); ++member) {
    if (member == segment_.rank() || (only >= 0 && member != only) || !segment_.has_begun(member))
      continue;
    writers.add(segment_.progress(member), done, segment_.at_end(), peers_.process_of(member));
  }
  if (!writers()) return;
  watches_writers_ = true;
  arena->quarantine(memory.data(), memory.size(), std::move(writers));
}

}  // namespace muster::collective::region
