// SPDX-License-Identifier: BSD-3-Clause
#include "muster/comm_hook.h"

#include <torch/types.h>

#include <optional>

#include "muster/collectives.h"
#include "muster/init.h"

namespace muster {

Group parallel::group_of(const GradBucket& bucket, const Group& given) {
  if (given) return given;
  return bucket.group ? bucket.group : default_group();
}

namespace {

CommHook averaging(const Group& given, std::optional<at::ScalarType> compressed_dtype) {
  return [given, compressed_dtype](const GradBucket& bucket) {
    const Group group = parallel::group_of(bucket, given);
    const auto ranks = static_cast<double>(get_world_size(group));
    at::Tensor sum = compressed_dtype ? bucket.buffer.to(*compressed_dtype) : bucket.buffer;
    sum.div_(ranks);
    auto work = all_reduce(sum, {.group = group, .async_op = true});
    return [sum, work] {
      work->wait();
      return sum;
    };
  };
}

}  // namespace

CommHook all_reduce_hook(const Group& group) { return averaging(group, std::nullopt); }
CommHook fp16_compress_hook(const Group& group) { return averaging(group, at::kHalf); }
CommHook bf16_compress_hook(const Group& group) { return averaging(group, at::kBFloat16); }

CommHook quantized_hook(Compression compression, const Group& group) {
  return [compression, group](const GradBucket& bucket) {
    const at::Tensor buffer = bucket.buffer;
    auto work = all_reduce(buffer, {.op = ReduceOp::AVG,
                                    .group = parallel::group_of(bucket, group),
                                    .async_op = true,
                                    .compression = compression});
    return [buffer, work] {
      work->wait();
      return buffer;
    };
  };
}

}  // namespace muster
