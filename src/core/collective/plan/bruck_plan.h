#pragma once

#include "core/collective/plan/slices.h"

namespace muster::collective::plan {

/// All-gather in ceil(log2(size)) steps for any size (Bruck et al., 1997). Blocks are in rotated
/// order: position i holds the block of rank `owner(i)`, position 0 the rank's own. Step s sends
/// the first `count(s)` positions to the rank 2^s below and receives as many from the rank 2^s
/// above, which are appended.
struct BruckPlan {
  int rank;
  int size;

  int steps() const { return doubling_steps(size); }
  int distance(int step) const { return 1 << step; }
  int count(int step) const {
    return distance(step) <= size - distance(step) ? distance(step) : size - distance(step);
  }
  int target(int step) const { return wrap(rank - distance(step), size); }
  int source(int step) const { return wrap(rank + distance(step), size); }
  int owner(int position) const { return wrap(rank + position, size); }
};

/// A barrier in the same number of steps: after step s, a rank knows that the 2^(s+1) - 1 ranks
/// below it have arrived.
struct DisseminationPlan {
  int rank;
  int size;

  int steps() const { return doubling_steps(size); }
  int target(int step) const { return wrap(rank + (1 << step), size); }
  int source(int step) const { return wrap(rank - (1 << step), size); }
};

}  // namespace muster::collective::plan
