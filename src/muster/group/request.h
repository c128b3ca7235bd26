/// One call of any operation, as it travels from the user's function to the backend.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "muster/base/clock.h"
#include "muster/collective/op.h"
#include "muster/group/reduce_op.h"
#include "muster/trace/recorder.h"

namespace muster {

using collective::Op;

inline constexpr int kAnyRank = -1;

/// What one member gives to, or gets from, one other: usually one tensor; the coalesced forms have
/// several, which travel back to back.
using Slice = c10::SmallVector<at::Tensor, 1>;
using Slices = c10::SmallVector<Slice, 1>;

/// Ranks in here are positions in the group. The slices are those of `collective::Args`:
/// one per member where `collective::info(op)` says that a side lists, else exactly one.
///   broadcast   outputs[0], in and out          all_reduce   inputs[0] and outputs[0] the same
///   tensors reduce      inputs[0]; outputs[0] on root   send         inputs[0]              recv
///   outputs[0]
struct Request {
  Op op = Op::barrier;
  std::string_view name = {};  ///< of the function that the user called, for errors; a literal
  Slices inputs = {};
  Slices outputs = {};
  ReduceOp reduce_op = ReduceOp::SUM;
  int root = -1;         ///< broadcast, reduce, gather, scatter
  int peer = kAnyRank;   ///< send, recv
  std::int64_t tag = 0;  ///< send, recv
  bool async_op = false;
  bool quiet = false;  ///< writes without a word to autograd, as torch's backends do wherever they
                       ///< copy nothing
  std::optional<Duration> timeout = {};  ///< absent: the group's
  TimePoint begun{};                     ///< set by ProcessGroup::submit
  TimePoint deadline{};                  ///< set by ProcessGroup::submit
  std::uint64_t sequence = 0;  ///< set by ProcessGroup::submit: collectives of this group, from 1
  trace::Mark mark =
      {};  ///< set by ProcessGroup::submit where the call ends later: the Work tells it how
};

}  // namespace muster
