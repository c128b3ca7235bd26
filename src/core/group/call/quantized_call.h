// SPDX-License-Identifier: BSD-3-Clause
/// What the compressed collectives (quantized.h) consist of: messages of encoded values, with what
/// their sender called, and the group's calls that carry them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/collective/quantized/block_codec.h"
#include "core/collective/quantized/piece_sums.h"
#include "core/group/call/call.h"
#include "core/group/call/dense_tensor.h"
#include "core/group/work/finished_work.h"
#include "core/group/work/following_work.h"
#include "muster/collectives.h"

namespace muster::group {

std::string_view name_of(Compression compression);

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
  const at::Tensor& dense() const { return dense_; }
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
  QuantizedCall(Call& plain, Compression compression, std::optional<Duration> timeout);

  std::size_t members() const { return static_cast<std::size_t>(group_->size()); }
  std::size_t own() const { return static_cast<std::size_t>(group_->rank()); }
  DType dtype() const { return dtype_; }
  collective::BlockFormat format() const {
    return compression_ == Compression::bf16   ? collective::BlockFormat::bf16
           : compression_ == Compression::int8 ? collective::BlockFormat::int8
                                               : collective::BlockFormat::int4;
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
  bool on_cpu() const;
  /// Whether `start` of the group's backend for the CPU takes a function to run before.
  bool prepares_calls() const;

  /// A message of `count` values: what this member called on `described` values, then the values.
  void write(std::byte* message, const std::byte* values, std::size_t count,
             std::size_t described) const;
  /// Its beginning.
  void write_facts(std::byte* message, std::size_t described) const;
  /// The values of a message.
  static std::byte* values_in(std::byte* message) { return message + sizeof(CalledFacts); }
  void encode(std::byte* encoded, const std::byte* values, std::size_t count) const {
    collective::encode(encoded, values, count, dtype_, format());
  }
  /// Whether the sender of a message called the same on `described` values.
  Status compare(const std::byte* message, std::size_t sender, std::size_t described) const;
  /// Throws a difference that `compare` found. The group has then failed, as after a difference
  /// that the engine finds.
  void require(const Status& same) const;
  void decode(std::byte* values, const std::byte* encoded, std::size_t count) const {
    collective::decode(values, encoded, count, dtype_, format());
  }

  /// Whether the engine sends the pieces of an all_reduce as they are made. The same on every
  /// member.
  bool takes_pieces() const;
  /// All steps of an all_reduce in one: `pieces` works on the memory of `values` until it has
  /// ended.
  WorkRef all_reduce(const at::Tensor& values, collective::PieceSums& pieces, bool async) const;

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
  CalledFacts called_on(std::size_t values) const;

  /// The group's own call on tensors of bytes, on the device that the group exchanges on.
  WorkRef run(Op op, const TensorList& inputs, const TensorList& outputs, int root, bool async,
              const std::function<Status()>* prepare = nullptr) const;

  const std::shared_ptr<GroupCore> group_;
  const std::string_view name_;
  const Op op_;
  const collective::Reduce reduce_;
  const Compression compression_;
  const DType dtype_;
  const std::uint64_t tag_;             // as the ordinary call's: calls with other tags never match
  const transport::Fingerprint whole_;  // the call that the engine compares in each step
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
      : count_(count),
        members_(members),
        blocks_((count + collective::kBlockValues - 1) / collective::kBlockValues) {}
  std::size_t first(std::size_t member) const {
    return std::min(count_, blocks_ * member / members_ * collective::kBlockValues);
  }
  std::size_t size(std::size_t member) const { return first(member + 1) - first(member); }

 private:
  const std::size_t count_, members_, blocks_;
};

/// The sizes of a member's messages to the owners of parts, and of those that it gets as an owner.
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

/// The messages that an owner has received, from `offset` of their values on, to be summed with its
/// own values.
inline collective::EncodedParts parts_in(const QuantizedCall& call, const ByteMessages& incoming,
                                         std::size_t offset, const std::byte* values,
                                         std::size_t count,
                                         std::vector<const std::byte*>& pointers) {
  for (std::size_t member = 0; member < call.members(); ++member)
    pointers.push_back(member == call.own() ? nullptr : call.values_in(incoming[member]) + offset);
  return {.encoded = pointers,
          .own = call.own(),
          .values = values,
          .count = count,
          .dtype = call.dtype(),
          .format = call.format(),
          .divisor = call.divisor()};
}

}  // namespace muster::group
