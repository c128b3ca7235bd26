#pragma once

#include "core/collective/plan/slices.h"

namespace muster::collective::plan {

/// Every rank meets every other once: in step s (from 1) it sends to the rank s above and receives
/// from the rank s below, so no rank is the target of two in one step.
struct PairwisePlan {
  int rank;
  int size;

  int steps() const { return size - 1; }
  int target(int step) const { return wrap(rank + step, size); }
  int source(int step) const { return wrap(rank - step, size); }
};

}  // namespace muster::collective::plan
