// SPDX-License-Identifier: BSD-3-Clause
/// The bytes of a planned message.
#pragma once

#include "core/collective/op.h"
#include "lab/model/schedule.h"

namespace muster::collective::plan {

/// As a fraction of the call's bytes.
inline double share_of(Op op, const Payload& payload, int ranks, int slices) {
  const bool each_gives_all = op == Op::all_reduce || op == Op::reduce;
  switch (payload.kind) {
    case Payload::Kind::token: return 0;
    case Payload::Kind::whole: return 1;
    case Payload::Kind::block:
      return each_gives_all ? payload.count : static_cast<double>(payload.count) / ranks;
    case Payload::Kind::pieces: return static_cast<double>(payload.count) / ranks;
    case Payload::Kind::piece: return 1.0 / ranks;
    case Payload::Kind::partial:
    case Payload::Kind::result: return payload.slice < 0 ? 1 : 1.0 / slices;
  }
  return 0;
}

inline bool is_added(Op op, const Payload& payload) {
  return info(op).reduces && payload.kind != Payload::Kind::result;
}

}  // namespace muster::collective::plan
