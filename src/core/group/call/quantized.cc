// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/quantized.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/base/environment.h"
#include "core/collective/quantized/block_codec.h"
#include "core/collective/select/selection.h"
#include "core/group/backends/native.h"
#include "core/group/call/call_builder.h"
#include "core/group/call/dense_tensor.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/work/finished_work.h"
#include "core/group/work/following_work.h"

namespace muster::group {
namespace {

using collective::BlockFormat;
using collective::kBlockValues;

std::string_view compression_name(Compression compression) {
  switch (compression) {
    case Compression::none: return "none";
    case Compression::bf16: return "bf16";
    case Compression::int8: return "int8";
    case Compression::int4: return "int4";
  }
  return "an unknown compression";
}

/// The call of a member, at the beginning of its messages. Compared by members that may be on other
/// hosts, of one byte order, as the engine's own messages.
struct CalledFacts {
  std::int64_t values = 0;  ///< of the tensor, or of the part that the message is for
  Op op = Op::all_reduce;
  std::uint8_t reduce = 0;
  std::uint8_t compression = 0;
  DType dtype = DType::float32;
  std::uint32_t spare = 0;
  bool operator==(const CalledFacts&) const = default;
};
static_assert(std::is_trivially_copyable_v<CalledFacts> && sizeof(CalledFacts) == 16);

/// The facts may be those of another member, so their numbers may be in no table.
std::string text_of(const CalledFacts& facts) {
  std::string text(compression_name(static_cast<Compression>(facts.compression)));
  text += " of " + std::to_string(facts.values) + " values of ";
  text += static_cast<int>(facts.dtype) < kDTypes ? muster::name_of(facts.dtype) : "unknown type";
  if (facts.op != Op::all_reduce && facts.op != Op::reduce_scatter) return text;
  const auto reduce = static_cast<collective::Reduce>(facts.reduce);
  text += " reduced by ";
  text +=
      facts.reduce < collective::kReduces ? collective::name_of(reduce) : "an unknown operation";
  return text;
}

/// Messages back to back in one tensor of bytes on the CPU, one per member.
class ByteMessages {
 public:
  explicit ByteMessages(const std::vector<std::size_t>& sizes) {
    std::size_t total = 0;
    for (const std::size_t size : sizes) total += size;
    bytes_ = at::empty({static_cast<std::int64_t>(total)}, at::kByte);
    std::size_t offset = 0;
    for (const std::size_t size : sizes) {
      views_.push_back(
          bytes_.narrow(0, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(size)));
      starts_.push_back(static_cast<std::byte*>(bytes_.mutable_data_ptr()) + offset);
      offset += size;
    }
  }
  const std::vector<at::Tensor>& views() const { return views_; }
  std::byte* operator[](std::size_t member) const { return starts_[member]; }

 private:
  at::Tensor bytes_;
  std::vector<at::Tensor> views_;
  std::vector<std::byte*> starts_;
};

/// A tensor's elements in contiguous memory of the CPU: its own, or a copy.
class DenseCopy {
 public:
  explicit DenseCopy(const at::Tensor& tensor)
      : original_(tensor.detach()),
        dense_(is_dense_cpu(original_) ? original_ : original_.cpu().resolve_neg().contiguous()) {}
  std::byte* data() const { return static_cast<std::byte*>(dense_.data_ptr()); }
  std::size_t count() const { return static_cast<std::size_t>(dense_.numel()); }
  /// After the elements have been written.
  void write_back() const {
    if (!dense_.is_same(original_)) original_.copy_(dense_);
  }

 private:
  at::Tensor original_, dense_;
};

/// One call of a member: what it called, and the steps of which the call consists.
class QuantizedCall {
 public:
  QuantizedCall(Call& plain, Compression compression, std::optional<Duration> timeout)
      : group_(plain.group().shared_from_this()),
        name_(plain.name()),
        op_(plain.op()),
        reduce_(plain.args.reduce),
        compression_(compression),
        dtype_(plain.args.dtype),
        tag_(plain.args.tag),
        limit_(deadline_after(steady_clock(), timeout.value_or(group_->timeout()))) {}

  std::size_t members() const { return static_cast<std::size_t>(group_->size()); }
  std::size_t own() const { return static_cast<std::size_t>(group_->rank()); }
  DType dtype() const { return dtype_; }
  BlockFormat format() const {
    return compression_ == Compression::bf16   ? BlockFormat::bf16
           : compression_ == Compression::int8 ? BlockFormat::int8
                                               : BlockFormat::int4;
  }
  std::size_t bytes_of(std::size_t values) const {
    return collective::encoded_bytes(format(), values);
  }
  std::size_t message_bytes(std::size_t values) const {
    return sizeof(CalledFacts) + bytes_of(values);
  }
  float divisor() const {
    return reduce_ == collective::Reduce::avg ? static_cast<float>(members()) : 1;
  }
  bool on_cpu() const { return group_->exchange_device().is_cpu(); }
  /// Whether `start` of the group's backend for the CPU takes a function to run before.
  bool prepares_calls() const {
    for (const auto& [device, backend] : group_->parts().backends) {
      if (device != c10::DeviceType::CPU) continue;
      const auto* native = dynamic_cast<const NativeBackend*>(backend.get());
      return native != nullptr && native->communicator()->prepares_calls();
    }
    return false;
  }

  /// A message of `count` values: what this member called on `described` values, then the values.
  void write(std::byte* message, const std::byte* values, std::size_t count,
             std::size_t described) const {
    const CalledFacts facts = called_on(described);
    std::memcpy(message, &facts, sizeof facts);
    collective::encode(message + sizeof facts, values, count, dtype_, format());
  }
  /// The values of a message.
  static const std::byte* values_in(const std::byte* message) {
    return message + sizeof(CalledFacts);
  }
  /// Whether the sender of a message called the same on `described` values.
  Status compare(const std::byte* message, std::size_t sender, std::size_t described) const {
    CalledFacts facts;
    std::memcpy(&facts, message, sizeof facts);
    if (facts == called_on(described)) return {};
    const int other = group_->first_rank_of(static_cast<int>(sender));
    const int here = group_->first_rank_of(group_->rank());
    return Status(Code::mismatch,
                  std::string(name_) + " with compression (group " + group_->name() + "): rank " +
                      std::to_string(here) + " called it with " + text_of(called_on(described)) +
                      ", rank " + std::to_string(other) + " with " + text_of(facts) +
                      "; give the same on all ranks",
                  {here, other});
  }
  /// Throws a difference that `compare` found. The group has then failed, as after a difference
  /// that the engine finds.
  void require(const Status& same) const {
    if (same.ok()) return;
    group_->abort(same.message());
    throw DistError(same);
  }
  void decode(std::byte* values, const std::byte* encoded, std::size_t count) const {
    collective::decode(values, encoded, count, dtype_, format());
  }

  /// The steps. Those with a Work go on after the return.
  WorkRef all_to_all(const ByteMessages& incoming, const ByteMessages& outgoing, bool async) const {
    return run(Op::all_to_all, outgoing.views(), incoming.views(), -1, async);
  }
  WorkRef all_gather(const ByteMessages& all, const ByteMessages& mine, bool async,
                     const std::function<Status()>* prepare = nullptr) const {
    return run(Op::all_gather, mine.views(), all.views(), -1, async, prepare);
  }
  WorkRef broadcast(const ByteMessages& message, int root, bool async) const {
    return run(Op::broadcast, {}, message.views(), root, async);
  }

 private:
  CalledFacts called_on(std::size_t values) const {
    return {.values = static_cast<std::int64_t>(values),
            .op = op_,
            .reduce = static_cast<std::uint8_t>(reduce_),
            .compression = static_cast<std::uint8_t>(compression_),
            .dtype = dtype_};
  }

  /// The group's own call on tensors of bytes, on the device that the group exchanges on.
  WorkRef run(Op op, const TensorList& inputs, const TensorList& outputs, int root, bool async,
              const std::function<Status()>* prepare = nullptr) const {
    const at::Device device = group_->exchange_device();
    const auto moved = [&](const TensorList& tensors) {
      TensorList there;
      for (const auto& tensor : tensors) there.push_back(tensor.to(device));
      return there;
    };
    const bool here = device.is_cpu();
    const TensorList in = here ? inputs : moved(inputs), out = here ? outputs : moved(outputs);
    Call call(*group_, op, FunctionName(name_), time_left(steady_clock(), limit_), async && here);
    call.args.tag = tag_;
    call.record.prepare = prepare;
    CallBuilder build(call);
    if (op == Op::broadcast) {
      build.root("src", {}, root);
      build.in_place(out.front());
    } else {
      if (op == Op::all_to_all)
        build.add_input(in);
      else
        build.add_input(in.front());
      build.add_output(out);
    }
    build.check();
    auto work = group_->submit(call);
    if (here) return work;
    for (std::size_t i = 0; i < out.size(); ++i) {
      at::Tensor back = outputs[i];
      back.copy_(out[i]);
    }
    return nullptr;
  }

  const std::shared_ptr<GroupCore> group_;
  const std::string_view name_;
  const Op op_;
  const collective::Reduce reduce_;
  const Compression compression_;
  const DType dtype_;
  const std::uint64_t tag_;  // as the ordinary call's: calls with other tags never match
  const TimePoint limit_;
};

/// The end of a call: `finish` runs now, or after the `work` of an asynchronous call, if it has
/// one. Calls on tensors of an accelerator have none: `finish` copies to them, on the stream of the
/// thread that runs it, which is to be the caller's.
template <class Finish>
WorkRef end_with(WorkRef work, Finish finish, bool async_op, TensorList tensors) {
  if (async_op && work != nullptr)
    return FollowingWork::create(
        std::move(work),
        [finish = std::move(finish)] {
          const at::NoGradGuard no_grad;
          finish();
        },
        std::move(tensors));
  finish();
  return async_op ? std::make_shared<FinishedWork>(std::move(tensors)) : nullptr;
}

/// The blocks of a tensor, dealt out to the members as evenly as whole blocks allow.
class BlockParts {
 public:
  BlockParts(std::size_t count, std::size_t members)
      : count_(count), members_(members), blocks_((count + kBlockValues - 1) / kBlockValues) {}
  std::size_t first(std::size_t member) const {
    return std::min(count_, blocks_ * member / members_ * kBlockValues);
  }
  std::size_t size(std::size_t member) const { return first(member + 1) - first(member); }

 private:
  const std::size_t count_, members_, blocks_;
};

/// The sizes of messages to the owners of parts, and of those that the owner of `mine` values gets.
struct MessageSizes {
  std::vector<std::size_t> outgoing, incoming;
};
template <class Size>
MessageSizes sizes_to_owners(const QuantizedCall& call, Size size) {
  MessageSizes sizes;
  for (std::size_t member = 0; member < call.members(); ++member) {
    const bool own = member == call.own();
    sizes.outgoing.push_back(own ? 0 : call.message_bytes(size(member)));
    sizes.incoming.push_back(own ? 0 : call.message_bytes(size(call.own())));
  }
  return sizes;
}

/// The messages that an owner has received, to be summed with its own values.
collective::EncodedParts parts_in(const QuantizedCall& call, const ByteMessages& incoming,
                                  const std::byte* values, std::size_t count,
                                  std::vector<const std::byte*>& pointers) {
  for (std::size_t member = 0; member < call.members(); ++member)
    pointers.push_back(member == call.own() ? nullptr : call.values_in(incoming[member]));
  return {.encoded = pointers,
          .own = call.own(),
          .values = values,
          .count = count,
          .dtype = call.dtype(),
          .format = call.format(),
          .divisor = call.divisor()};
}

/// Error feedback of a float32 all_reduce: what earlier calls lost is added to the values, and what
/// this one loses is kept, once it has succeeded: a call that fails leaves the rests as they were.
/// A part's loss is counted in units of the sum.
class Feedback {
 public:
  Feedback(const at::Tensor& rests, const DenseCopy& values)
      : given_(rests), next_(rests.clone()), rests_(next_) {
    float* const to = floats(values.data());
    const float* const rest = floats(rests_.data());
    for (std::size_t i = 0; i < values.count(); ++i) to[i] += rest[i];
  }
  /// Keeps what `count` values, the first of which is number `first`, have lost in `encoded`.
  void keep_loss(const QuantizedCall& call, std::size_t first, const std::byte* values,
                 const std::byte* encoded, std::size_t count, float weight) const {
    std::byte* const to = rests_.data() + first * sizeof(float);
    call.decode(to, encoded, count);
    const float* const given = floats(values);
    float* const rest = floats(to);
    for (std::size_t i = 0; i < count; ++i) {
      const float lost = (given[i] - rest[i]) * weight;
      rest[i] = std::isfinite(lost) ? lost : 0;  // NaN and infinite values arrive
    }
  }
  void write_back() const {
    rests_.write_back();
    given_.copy_(next_);
  }

 private:
  static float* floats(std::byte* bytes) { return reinterpret_cast<float*>(bytes); }
  static const float* floats(const std::byte* bytes) {
    return reinterpret_cast<const float*>(bytes);
  }
  const at::Tensor given_, next_;
  const DenseCopy rests_;  // of `next_`
};

/// An all_reduce between its steps.
class QuantizedSum {
 public:
  QuantizedSum(const QuantizedCall& call, const at::Tensor& tensor,
               const std::optional<at::Tensor>& feedback)
      : call_(call),
        values_(tensor),
        parts_(values_.count(), call.members()),
        sizes_(sizes_to_owners(call, [this](std::size_t member) { return parts_.size(member); })),
        outgoing_(sizes_.outgoing),
        incoming_(sizes_.incoming),
        sum_({call.bytes_of(parts_.size(call.own()))}),
        sums_(encoded_sizes()) {
    if (feedback) feedback_.emplace(*feedback, values_);
    for (std::size_t member = 0; member < call_.members(); ++member) {
      if (member == call_.own()) continue;
      call_.write(outgoing_[member], part(member), parts_.size(member), values_.count());
      if (feedback_) keep_loss(member, call_.values_in(outgoing_[member]), 1);
    }
  }
  WorkRef exchange(bool async) const { return call_.all_to_all(incoming_, outgoing_, async); }
  /// Between the steps.
  Status add() const {
    for (std::size_t member = 0; member < call_.members(); ++member) {
      if (member == call_.own()) continue;
      if (auto same = call_.compare(incoming_[member], member, values_.count()); !same.ok())
        return same;
    }
    std::vector<const std::byte*> pointers;
    const std::size_t own = call_.own();
    const auto parts = parts_in(call_, incoming_, part(own), parts_.size(own), pointers);
    if (!feedback_) {
      collective::sum_and_encode(sum_[0], parts);
      return {};
    }
    collective::sum_and_store(part(own), parts);
    collective::encode(sum_[0], part(own), parts_.size(own), call_.dtype(), call_.format());
    keep_loss(own, sum_[0], call_.divisor());
    return {};
  }
  WorkRef gather(bool async, const std::function<Status()>* prepare = nullptr) const {
    return call_.all_gather(sums_, sum_, async, prepare);
  }
  void finish() const {
    for (std::size_t member = 0; member < call_.members(); ++member)
      call_.decode(part(member), sums_[member], parts_.size(member));
    values_.write_back();
    if (feedback_) feedback_->write_back();
  }

 private:
  void keep_loss(std::size_t member, const std::byte* encoded, float weight) const {
    feedback_->keep_loss(call_, parts_.first(member), part(member), encoded, parts_.size(member),
                         weight);
  }
  std::byte* part(std::size_t member) const {
    return values_.data() + parts_.first(member) * size_of(call_.dtype());
  }
  std::vector<std::size_t> encoded_sizes() const {
    std::vector<std::size_t> sizes;
    for (std::size_t member = 0; member < call_.members(); ++member)
      sizes.push_back(call_.bytes_of(parts_.size(member)));
    return sizes;
  }

  const QuantizedCall call_;
  const DenseCopy values_;
  const BlockParts parts_;
  const MessageSizes sizes_;
  const ByteMessages outgoing_, incoming_, sum_, sums_;
  std::optional<Feedback> feedback_;
};

/// Refuses a tensor of rests that does not fit. A call that compresses nothing adds what is there.
void check_feedback(Call& plain, const at::Tensor& tensor, const at::Tensor& rests) {
  const auto refuse = [&](const std::string& why) {
    plain.group().refuse(plain, DistError(why, Code::invalid_argument));
  };
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
    refuse("compression to " + std::string(compression_name(compression)) +
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

/// Asynchronous calls queue both steps at once: the group's calls keep their order.
WorkRef all_reduce_quantized(Call& plain, const at::Tensor& tensor,
                             const AllReduceOptions& options) {
  if (plain.problem() == Problem::kind && tensor.defined() && tensor.layout() != at::kStrided)
    plain.group().refuse(plain, DistError("with compression only dense tensors can be reduced; "
                                          "call to_dense(), or call without compression"));
  const at::NoGradGuard no_grad;
  if (options.feedback && plain.problem() == Problem::none)
    check_feedback(plain, tensor, *options.feedback);
  if (needs_no_compression(plain, options.compression, true)) {
    if (options.feedback && plain.problem() == Problem::none) {  // nothing is lost
      at::Tensor values = tensor.detach();
      values.add_(options.feedback->reshape(values.sizes()));
      options.feedback->zero_();
    }
    return plain.group().submit(plain);
  }
  const QuantizedCall call(plain, options.compression, options.timeout);
  const auto sum = std::make_shared<const QuantizedSum>(call, tensor, options.feedback);
  const bool async = options.async_op && tensor.is_cpu() && call.on_cpu() && call.prepares_calls();
  sum->exchange(async);
  if (!async) {
    call.require(sum->add());
    sum->gather(false);
    sum->finish();
    return options.async_op ? std::make_shared<FinishedWork>(TensorList{tensor}) : nullptr;
  }
  // The Work keeps the sum until the call has ended: the engine's threads must not destroy tensors.
  const std::function<Status()> add = [weak = std::weak_ptr(sum)]() -> Status {
    const auto kept = weak.lock();
    return kept ? kept->add() : Status(Code::internal, "the sums have been dropped");
  };
  auto work = sum->gather(true, &add);
  return end_with(std::move(work), [sum] { sum->finish(); }, true, {tensor});
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
                              parts_in(call, incoming, mine.data(), result.count(), pointers));
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
