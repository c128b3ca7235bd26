// SPDX-License-Identifier: BSD-3-Clause
/// What an all_reduce of encoded values computes, in pieces, so that the engine encodes and sums
/// while earlier pieces travel (links/link_pieces.cc).
///
/// Each member owns a part of the values and sums it. A part has as many pieces as any other, whole
/// blocks each, so the bits do not depend on their number.
#pragma once

#include "core/base/bytes.h"

namespace muster::collective {

/// Called by one thread at a time. Nothing here throws or waits. The returned memory is the
/// object's, and stays until the call has ended.
class PieceSums {
 public:
  virtual ~PieceSums() = default;
  /// From 1 to `fixed::kEncodedPieces`, the same on every member.
  virtual int pieces() const = 0;
  /// Encodes this member's values of a piece of `member`'s part, once.
  virtual ConstBytes encode(int member, int piece) = 0;
  /// Memory for `member`'s values of a piece of this member's part.
  virtual MutableBytes values_from(int member, int piece) = 0;
  /// Sums a piece of this member's part, once the values of all others are there.
  virtual ConstBytes sum(int piece) = 0;
  /// Memory for the sums of a piece of `member`'s part.
  virtual MutableBytes sums_from(int member, int piece) = 0;
  /// Stores the sums of a piece of `member`'s part, once they are there.
  virtual void decode(int member, int piece) = 0;
};

}  // namespace muster::collective
