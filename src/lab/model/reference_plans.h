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

/// All-reduce by pairwise exchange at doubling distances. If the size is no power of two, the first
/// ranks pair up before and after, and the odd rank of each pair takes part for both.
struct RecursiveDoublingPlan {
  int rank;
  int size;

  int core() const {
    int power = 1;
    while (2 * power <= size) power *= 2;
    return power;
  }
  int extra() const { return size - core(); }
  bool folds() const { return extra() > 0; }
  bool folded() const { return rank < 2 * extra() && rank % 2 == 0; }
  int exchanges() const { return doubling_steps(core()); }
  int steps() const { return exchanges() + (folds() ? 2 : 0); }
  /// The partner in a folding step, or -1.
  int pair() const { return rank >= 2 * extra() ? -1 : rank % 2 == 0 ? rank + 1 : rank - 1; }

  /// Position among the ranks that exchange.
  int position() const { return rank < 2 * extra() ? rank / 2 : rank - extra(); }
  int rank_at(int position) const {
    return position < extra() ? 2 * position + 1 : position + extra();
  }
  int partner(int exchange) const { return rank_at(position() ^ (1 << exchange)); }
  /// Range of the ranks whose sum the rank at `position` holds before an exchange: first and one
  /// past the last.
  int sum_begin(int position, int exchange) const {
    return first_of(position >> exchange << exchange);
  }
  int sum_end(int position, int exchange) const {
    return first_of(((position >> exchange) + 1) << exchange);
  }

 private:
  int first_of(int position) const {
    return position < extra() ? 2 * position : position + extra();
  }
};

}  // namespace muster::collective::plan
