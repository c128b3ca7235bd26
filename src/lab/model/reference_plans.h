// SPDX-License-Identifier: BSD-3-Clause
/// Plans that muster does not run, because they do not add in rank order. They serve as a reference
/// for muster's own plans: their cost is known from the literature (Thakur et al., 2005).
#pragma once

#include "core/collective/plan/plan.h"

namespace muster::collective::plan {

/// All-reduce around a ring: in the first size - 1 steps, a slice's sum grows by one rank's part
/// per step; in the others, the sums circulate.
struct RingReducePlan {
  int rank;
  int size;

  int steps() const { return 2 * (size - 1); }
  bool sums(int step) const { return step < size - 1; }
  int next() const { return wrap(rank + 1, size); }
  int previous() const { return wrap(rank - 1, size); }
  /// The sum of slice k starts on rank k and is complete on the rank below it.
  int sent_slice(int step) const {
    return sums(step) ? wrap(rank - step, size) : wrap(rank + 1 - (step - (size - 1)), size);
  }
  int received_slice(int step) const { return RingReducePlan{previous(), size}.sent_slice(step); }
};

}  // namespace muster::collective::plan
