// SPDX-License-Identifier: BSD-3-Clause
/// The steps of a compressed all_reduce, and its error feedback.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/collective/quantized/block_codec.h"
#include "core/group/call/quantized_call.h"

namespace muster::group {

/// A tensor of rests that a call in flight reads, and writes when it ends: no other call of this
/// process may have it meanwhile.
class FeedbackClaim {
 public:
  /// Null if another call has it.
  static std::shared_ptr<const FeedbackClaim> make(const at::Tensor& rests);
  ~FeedbackClaim();
  FeedbackClaim(const FeedbackClaim&) = delete;
  FeedbackClaim& operator=(const FeedbackClaim&) = delete;
  const at::Tensor& rests() const { return rests_; }

 private:
  explicit FeedbackClaim(const at::Tensor& rests) : rests_(rests) {}
  const at::Tensor rests_;
};

/// Error feedback of a float32 all_reduce: what earlier calls lost is added to the values, and what
/// this one loses is kept, once it has succeeded: a call that fails leaves the rests as they were.
/// A part's loss is counted in units of the sum.
class Feedback {
 public:
  Feedback(std::shared_ptr<const FeedbackClaim> claim, const DenseCopy& values)
      : claim_(std::move(claim)), next_(claim_->rests().clone()), rests_(next_) {
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
    at::Tensor given = claim_->rests();
    given.copy_(next_);
  }

 private:
  static float* floats(std::byte* bytes) { return reinterpret_cast<float*>(bytes); }
  static const float* floats(const std::byte* bytes) {
    return reinterpret_cast<const float*>(bytes);
  }
  const std::shared_ptr<const FeedbackClaim> claim_;
  const at::Tensor next_;
  const DenseCopy rests_;  // of `next_`
};

/// An all_reduce between its steps.
class QuantizedSum {
 public:
  QuantizedSum(const QuantizedCall& call, const at::Tensor& tensor,
               std::shared_ptr<const FeedbackClaim> feedback)
      : call_(call),
        values_(tensor),
        parts_(values_.count(), call.members()),
        sizes_(sizes_to_owners(call, [this](std::size_t member) { return parts_.size(member); })),
        outgoing_(sizes_.outgoing),
        incoming_(sizes_.incoming),
        sum_({call.bytes_of(parts_.size(call.own()))}),
        sums_(encoded_sizes()) {
    if (feedback != nullptr) feedback_.emplace(std::move(feedback), values_);
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

}  // namespace muster::group
