// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/quantized.h"

#include <ATen/core/grad_mode.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/environment.h"
#include "core/collective/quantized/block_codec.h"
#include "core/collective/select/selection.h"
#include "core/group/call/dense_tensor.h"
#include "core/group/call/quantized_call.h"
#include "core/group/call/quantized_sum.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/work/finished_work.h"
#include "core/group/work/following_work.h"

namespace muster::group {
namespace {

/// Refuses a tensor of rests that does not fit. A call that loses nothing, as in shared memory,
/// adds what is there and leaves zeros.
void check_feedback(Call& plain, const at::Tensor& tensor, const at::Tensor& rests,
                    Compression compression) {
  const auto refuse = [&](const std::string& why) {
    plain.group().refuse(plain, DistError(why, Code::invalid_argument));
  };
  if (compression == Compression::none)
    refuse("feedback needs a compression: give bf16, int8 or int4, or give no feedback");
  if (tensor.scalar_type() != at::kFloat)
    refuse("feedback goes with tensors of float32, not with " +
           std::string(muster::name_of(plain.args.dtype)));
  if (!rests.defined() || rests.scalar_type() != at::kFloat || rests.numel() != tensor.numel() ||
      !is_one_array(rests) || rests.is_alias_of(tensor))
    refuse(
        "feedback is to be a dense float32 tensor of its own with as many elements as the "
        "reduced one, which has " +
        std::to_string(tensor.numel()));
}

/// Whether the group's calls are to be compressed. The same on every member.
bool compresses(const GroupCore& group) {
  using collective::Medium;
  if (group.size() == 1) return false;
  if (collective::pays_to_compress(group.shares_memory() ? Medium::shared_memory : Medium::network))
    return true;
  const auto forced = env_flag("MUSTER_COMPRESS_WITHIN_HOST");
  if (!forced.ok()) throw DistError(forced.status());
  return forced->value_or(false);
}

/// Whether the ordinary call is to be made. Refuses what cannot be compressed.
bool needs_no_compression(Call& plain, Compression compression, bool reduces) {
  GroupCore& group = plain.group();
  if (plain.problem() != Problem::none) return true;  // it explains the problem
  const auto refuse = [&](const std::string& why) {
    group.refuse(plain, DistError(why, Code::invalid_argument));
  };
  if (compression != Compression::bf16 && compression != Compression::int8 &&
      compression != Compression::int4)
    refuse("there is no such compression; give bf16, int8 or int4, or none");
  if (!collective::can_encode(plain.args.dtype))
    refuse("compression to " + std::string(group::name_of(compression)) +
           " is for float32, float16 and bfloat16, not for " +
           std::string(muster::name_of(plain.args.dtype)) +
           "; convert the tensor, or call without compression");
  if (reduces && plain.args.reduce != collective::Reduce::sum &&
      plain.args.reduce != collective::Reduce::avg)
    refuse("with compression only SUM and AVG are possible, not " +
           std::string(collective::name_of(plain.args.reduce)) +
           "; use one of these, or call without compression");
  return !compresses(group) ||
         (compression == Compression::bf16 && plain.args.dtype != DType::float32);
}

}  // namespace

WorkRef broadcast_quantized(Call& plain, const at::Tensor& tensor,
                            const BroadcastOptions& options) {
  if (needs_no_compression(plain, options.compression, false)) return plain.group().submit(plain);
  const at::NoGradGuard no_grad;
  const QuantizedCall call(plain, options.compression, options.timeout);
  const DenseCopy values(tensor);
  const ByteMessages message({call.message_bytes(values.count())});
  const auto root = static_cast<std::size_t>(plain.root());
  if (call.own() == root) call.write(message[0], values.data(), values.count(), values.count());
  auto work = call.broadcast(message, plain.root(), options.async_op && tensor.is_cpu());
  const auto finish = [call, message, values, root] {
    call.require(call.compare(message[0], root, values.count()));
    call.decode(values.data(), call.values_in(message[0]), values.count());
    values.write_back();
  };
  return end_with(std::move(work), finish, options.async_op, {tensor});
}

namespace {

WorkRef run_in_pieces(const std::shared_ptr<QuantizedSum>& sum, const at::Tensor& tensor,
                      bool async_op) {
  const WorkRef work = sum->run(async_op && tensor.is_cpu());
  try {
    return end_with(work, [sum] { sum->finish(); }, async_op, {tensor});
  } catch (...) {  // the engine uses the sum until the call has ended
    try {
      if (work != nullptr) work->wait();
    } catch (const std::exception&) {  // the first failure is thrown
    }
    throw;
  }
}

}  // namespace

/// Asynchronous calls of two steps queue both at once: the group's calls keep their order.
WorkRef all_reduce_quantized(Call& plain, const at::Tensor& tensor,
                             const AllReduceOptions& options) {
  if (plain.problem() == Problem::kind && tensor.defined() && tensor.layout() != at::kStrided)
    plain.group().refuse(plain, DistError("with compression only dense tensors can be reduced; "
                                          "call to_dense(), or call without compression"));
  const at::NoGradGuard no_grad;
  if (options.feedback && plain.problem() == Problem::none)
    check_feedback(plain, tensor, *options.feedback, options.compression);
  if (needs_no_compression(plain, options.compression, true)) {
    const bool adds = options.feedback && plain.problem() == Problem::none;
    if (adds) {
      at::Tensor values = tensor.detach();
      values.add_(options.feedback->reshape(values.sizes()));
    }
    auto work = plain.group().submit(plain);
    if (adds) options.feedback->zero_();  // nothing is lost
    return work;
  }
  std::shared_ptr<const FeedbackClaim> claim;
  if (options.feedback) {
    claim = FeedbackClaim::make(*options.feedback);
    if (claim == nullptr)
      plain.group().refuse(
          plain,
          DistError("feedback is in use by a call that has not ended; wait for that call, or "
                    "give each call a tensor of its own",
                    Code::invalid_argument));
  }
  const QuantizedCall call(plain, options.compression, options.timeout);
  const bool in_pieces = call.takes_pieces();
  const auto sum = std::make_shared<QuantizedSum>(call, tensor, std::move(claim), in_pieces);
  if (in_pieces) return run_in_pieces(sum, tensor, options.async_op);
  const bool async = options.async_op && tensor.is_cpu() && call.on_cpu() && call.prepares_calls();
  sum->exchange(async);
  const auto finish = [sum] {
    sum->decode_all();
    sum->finish();
  };
  if (!async) {
    call.require(sum->add());
    sum->gather(false);
    return end_with(nullptr, finish, options.async_op, {tensor});
  }
  // The Work keeps the sum until the call has ended: the engine's threads must not destroy tensors.
  const std::function<Status()> add = [weak = std::weak_ptr(sum)]() -> Status {
    const auto kept = weak.lock();
    return kept ? kept->add() : Status(Code::internal, "the sums have been dropped");
  };
  return end_with(sum->gather(true, &add), finish, true, {tensor});
}

WorkRef all_gather_quantized(Call& plain, const TensorList& outputs, const at::Tensor& input,
                             const CollectiveOptions& options) {
  if (needs_no_compression(plain, options.compression, false)) return plain.group().submit(plain);
  const at::NoGradGuard no_grad;
  const QuantizedCall call(plain, options.compression, options.timeout);
  const DenseCopy values(input);
  const ByteMessages mine({call.message_bytes(values.count())});
  call.write(mine[0], values.data(), values.count(), values.count());
  std::vector<std::size_t> sizes;
  for (const auto& output : outputs)
    sizes.push_back(call.message_bytes(static_cast<std::size_t>(output.numel())));
  const ByteMessages all(sizes);
  auto work = call.all_gather(all, mine, options.async_op && input.is_cpu());
  const auto finish = [call, all, outputs] {
    for (std::size_t member = 0; member < outputs.size(); ++member) {
      const DenseCopy output(outputs[member]);
      call.require(call.compare(all[member], member, output.count()));
      call.decode(output.data(), call.values_in(all[member]), output.count());
      output.write_back();
      mark_written(outputs[member]);
    }
  };
  return end_with(std::move(work), finish, options.async_op, outputs);
}

WorkRef reduce_scatter_quantized(Call& plain, const at::Tensor& output, const TensorList& inputs,
                                 const ReduceScatterOptions& options) {
  if (needs_no_compression(plain, options.compression, true)) return plain.group().submit(plain);
  const at::NoGradGuard no_grad;
  const QuantizedCall call(plain, options.compression, options.timeout);
  const DenseCopy result(output), mine(inputs[call.own()]);
  const MessageSizes sizes = sizes_to_owners(call, [&](std::size_t member) {
    return static_cast<std::size_t>((member == call.own() ? output : inputs[member]).numel());
  });
  const ByteMessages outgoing(sizes.outgoing), incoming(sizes.incoming);
  for (std::size_t member = 0; member < call.members(); ++member) {
    if (member == call.own()) continue;
    const DenseCopy values(inputs[member]);
    call.write(outgoing[member], values.data(), values.count(), values.count());
  }
  auto work = call.all_to_all(incoming, outgoing, options.async_op && output.is_cpu());
  const auto finish = [call, incoming, mine, result, output] {
    for (std::size_t member = 0; member < call.members(); ++member)
      if (member != call.own())
        call.require(call.compare(incoming[member], member, result.count()));
    std::vector<const std::byte*> pointers;
    collective::sum_and_store(result.data(),
                              parts_in(call, incoming, 0, mine.data(), result.count(), pointers));
    result.write_back();
    mark_written(output);
  };
  return end_with(std::move(work), finish, options.async_op, {output});
}

WorkRef refuse_compression(Call& plain) {
  if (plain.problem() == Problem::not_a_member) return nullptr;
  plain.group().refuse(
      plain, DistError("this function has no compression; all_reduce, reduce_scatter, "
                       "reduce_scatter_tensor, all_gather, all_gather_into_tensor and broadcast do",
                       Code::unsupported));
}

}  // namespace muster::group
