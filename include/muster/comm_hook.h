// SPDX-License-Identifier: BSD-3-Clause
/// Communication hooks: how a bucket of gradients is averaged between backward and the optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "muster/collectives.h"
#include "muster/process_group.h"

namespace muster {

/// One bucket. The tensors alias the reducer's memory and are valid until the hook's result has
/// been consumed.
struct GradBucket {
  std::size_t index = 0;  ///< buckets are communicated in this order, equal on all ranks
  bool is_last = false;   ///< last bucket of this backward pass
  /// All gradients of the bucket as a one-dimensional tensor: this rank's sums, not divided.
  /// Complex gradients are stored as pairs of reals.
  at::Tensor buffer = {};
  /// Views of `buffer`, shaped like their parameters; complex ones have a trailing dimension of
  /// size 2.
  std::vector<at::Tensor> gradients = {};
  std::vector<at::Tensor> parameters = {};
  /// The model's group. Hooks should communicate on it: a failure in backward aborts the calls on
  /// this group, while calls on another group wait for their timeout.
  Group group = nullptr;
};

/// Starts the communication of a bucket and immediately returns a function that finishes it. That
/// function blocks and returns the gradients for the optimizer: as many elements as `buffer`, of
/// any floating dtype (it may be `buffer` itself). The hook runs during backward, in bucket order,
/// on every rank; the finishing functions run in the same order at the end of backward. Exceptions
/// propagate out of backward.
using CommHook = std::function<std::function<at::Tensor()>(const GradBucket& bucket)>;

/// Averages over `group` (null: the bucket's own group, the usual choice). Equivalent to no hook,
/// except that the hook divides instead of the reducer.
CommHook all_reduce_hook(const Group& group = nullptr);
/// As all_reduce_hook, but divides first and sends float16 or bfloat16: half the bytes at lower
/// precision.
CommHook fp16_compress_hook(const Group& group = nullptr);
CommHook bf16_compress_hook(const Group& group = nullptr);
/// Averages with `compression` of `all_reduce`, whose errors it has, for gradients of float32,
/// float16 and bfloat16: an eighth of the bytes of float32 in int4, a fourth in int8.
CommHook quantized_hook(Compression compression, const Group& group = nullptr);

namespace parallel {

/// The group for a hook constructed with `given`: `given`, otherwise the bucket's group, otherwise
/// (a bucket not made by a model) the default group.
Group group_of(const GradBucket& bucket, const Group& given);

}  // namespace parallel
}  // namespace muster
