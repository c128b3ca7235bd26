#pragma once

#include "muster/collective/plan/slices.h"

namespace muster::collective::plan {

/// All-gather in ceil(log2(size)) steps for any size (Bruck et al., 1997). Blocks stand in rotated
/// order: position i holds the block of rank `owner(i)`, position 0 one's own. Step s sends the
/// first `count(s)` positions down by 2^s and receives as many from 2^s up, to stand behind those
/// already there.
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

/// A barrier in as many steps: after step s a rank knows that the 2^(s+1) - 1 ranks below it have
/// come.
struct DisseminationPlan {
  int rank;
  int size;

  int steps() const { return doubling_steps(size); }
  int target(int step) const { return wrap(rank + (1 << step), size); }
  int source(int step) const { return wrap(rank - (1 << step), size); }
};

}  // namespace muster::collective::plan
