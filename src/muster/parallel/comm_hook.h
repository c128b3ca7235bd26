/// What happens to a bucket of gradients between backward and the optimizer: plain averaging, or
/// something of the user's.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "muster/group/process_group.h"

namespace muster {

/// One bucket on its way. The tensors alias the reducer's memory; they are valid until the hook's
/// result has been taken.
struct GradBucket {
  std::size_t index = 0;  ///< buckets come in this order, the same on every rank
  bool is_last = false;   ///< of this backward pass
  /// All gradients of the bucket, one dimension; this rank's own sums, not divided. Complex
  /// gradients are pairs of reals.
  at::Tensor buffer = {};
  std::vector<at::Tensor> gradients =
      {};  ///< views of `buffer`, shaped like their parameters; pairs in one more dimension, of two
  std::vector<at::Tensor> parameters = {};
  /// The model's own, of the ranks that train together. What hooks communicate belongs on it: a
  /// failure in backward, which leaves the other ranks in the middle of a bucket, ends the calls on
  /// this group; on another they wait until its timeout.
  Group group = nullptr;
};

/// Starts the communication of a bucket and returns at once what finishes it: a function that
/// blocks and gives the gradients for the optimizer, as many elements as `buffer`, of any floating
/// dtype (it may be `buffer` itself). Called under backward, in bucket order, on every rank;
/// finished in the same order at backward's end. What it throws comes out of backward.
using CommHook = std::function<std::function<at::Tensor()>(const GradBucket& bucket)>;

/// The average over `group` (null: the bucket's own, which is what one wants): what happens without
/// a hook, up to where the division is done.
CommHook all_reduce_hook(const Group& group = nullptr);
/// The same, with what travels cast to float16 or bfloat16 and divided first: half the bytes, fewer
/// bits.
CommHook fp16_compress_hook(const Group& group = nullptr);
CommHook bf16_compress_hook(const Group& group = nullptr);

namespace parallel {

/// What a hook that was given `given` communicates on: that, else the bucket's own group, else, for
/// a bucket that no model made, the default group.
Group group_of(const GradBucket& bucket, const Group& given);

}  // namespace parallel
}  // namespace muster
