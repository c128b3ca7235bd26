#include "muster/shm/quarantine.h"

#include <algorithm>
#include <utility>

namespace muster::shm {

bool Quarantine::overlaps(const Range& block) const {
  return std::any_of(lent_.begin(), lent_.end(), [&](const Lent& lent) {
    return lent.range.offset < block.offset + block.bytes &&
           block.offset < lent.range.offset + lent.range.bytes;
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
  const auto done = std::stable_partition(lent_.begin(), lent_.end(),
                                          [](const Lent& lent) { return lent.held(); });
  for (auto lent = done; lent != lent_.end(); ++lent) over.held.push_back(std::move(lent->held));
  lent_.erase(done, lent_.end());
  if (over.held.empty()) return over;
  std::erase_if(kept_, [&](const Range& block) {
    if (overlaps(block)) return false;
    over.blocks.push_back(block.offset);
    bytes_ -= block.bytes;
    return true;
  });
  return over;
}

}  // namespace muster::shm
