// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/arena/quarantine.h"

#include <algorithm>
#include <utility>

namespace muster::shm {

bool Quarantine::overlaps(const Range& block) const {
  return std::any_of(exposed_.begin(), exposed_.end(), [&](const ExposedRange& exposed) {
    return exposed.range.offset < block.offset + block.bytes &&
           block.offset < exposed.range.offset + exposed.range.bytes;
  });
}

bool Quarantine::keep(Range block) {
  if (!overlaps(block)) return false;
  const auto is_it = [&](const Range& kept) { return kept.offset == block.offset; };
  if (std::any_of(kept_.begin(), kept_.end(), is_it)) return true;  // a double free; ignore it
  kept_.push_back(block);
  bytes_ += block.bytes;
  return true;
}

Quarantine::Over Quarantine::sweep() {
  Over over;
  const auto done = std::stable_partition(
      exposed_.begin(), exposed_.end(), [](const ExposedRange& exposed) { return exposed.held(); });
  for (auto exposed = done; exposed != exposed_.end(); ++exposed)
    over.held.push_back(std::move(exposed->held));
  exposed_.erase(done, exposed_.end());
  if (over.held.empty()) return over;
  std::erase_if(kept_, [&](const Range& block) {
    if (overlaps(block)) return false;
    over.blocks.push_back(block.offset);
    bytes_ -= block.bytes;
    return true;
  });
  return over;
}

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
