#pragma once

#include <algorithm>

#include "core/collective/plan/slices.h"

namespace muster::collective::plan {

/// A binomial tree below `root`. Its depth and the root's number of children are ceil(log2(size)).
/// The child with the largest subtree comes first and should be served first.
struct TreePlan {
  int rank;
  int size;
  int root;

  /// -1 at the root.
  int parent() const {
    const int position = place();
    return position == 0 ? -1 : at(position & (position - 1));
  }
  int children() const {
    int number = 0;
    for (int bit = 1; bit < lowest_bit() && place() + bit < size; bit *= 2) ++number;
    return number;
  }
  int child(int index) const { return at(place() + (1 << (children() - 1 - index))); }
  TreePlan below(int index) const { return {child(index), size, root}; }
  /// Number of ranks in this rank's subtree: contiguous from its own, wrapping around.
  int subtree() const { return std::min(lowest_bit(), size - place()); }

 private:
  int place() const { return wrap(rank - root, size); }
  int at(int position) const { return wrap(position + root, size); }
  // The subtree of a position: those that differ from it only in lower bits; all for the root.
  int lowest_bit() const { return place() == 0 ? 1 << doubling_steps(size) : place() & -place(); }
};

/// A chain from the root through every rank to the last: the longest path, but the least work for
/// the busiest rank.
struct ChainPlan {
  int rank;
  int size;
  int root;

  /// -1 at the root.
  int parent() const { return rank == root ? -1 : wrap(rank - 1, size); }
  int children() const { return wrap(rank + 1, size) == root ? 0 : 1; }
  int child(int) const { return wrap(rank + 1, size); }
};

}  // namespace muster::collective::plan
