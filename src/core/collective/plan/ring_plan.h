#pragma once

#include "core/collective/plan/slices.h"

namespace muster::collective::plan {

/// All-gather around a ring: in step s every rank forwards the block that it received in step s - 1
/// (its own in step 0).
struct RingPlan {
  int rank;
  int size;

  int steps() const { return size - 1; }
  int next() const { return wrap(rank + 1, size); }
  int previous() const { return wrap(rank - 1, size); }
  int sent_block(int step) const { return wrap(rank - step, size); }
  int received_block(int step) const { return wrap(rank - step - 1, size); }
};

}  // namespace muster::collective::plan
