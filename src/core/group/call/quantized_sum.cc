// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/quantized_sum.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <unordered_set>

#include "core/collective/quantized/block_codec.h"
#include "core/tunables/tunables.h"

namespace muster::group {
namespace {

/// The memory of all claimed tensors. Never destroyed: calls may outlive statics.
struct ClaimedRests {
  std::mutex lock;
  std::unordered_set<const void*> memory;  // under the lock
  static ClaimedRests& of_process() {
    static auto* const claimed = new ClaimedRests;
    return *claimed;
  }
};

float* floats(std::byte* bytes) { return reinterpret_cast<float*>(bytes); }
const float* floats(const std::byte* bytes) { return reinterpret_cast<const float*>(bytes); }

/// The number of pieces of each part: from its size alone, so that all members have as many.
int pieces_of(std::size_t values, std::size_t members, DType dtype) {
  const std::size_t bytes = values / members * size_of(dtype);
  return static_cast<int>(
      std::clamp<std::size_t>(bytes / fixed::kEncodedPiece, 1, fixed::kEncodedPieces));
}

}  // namespace

std::shared_ptr<const FeedbackClaim> FeedbackClaim::make(const at::Tensor& rests) {
  const void* const memory = rests.const_data_ptr();
  if (rests.numel() > 0) {  // an empty one has no memory
    ClaimedRests& claimed = ClaimedRests::of_process();
    const std::lock_guard guard(claimed.lock);
    if (!claimed.memory.insert(memory).second) return nullptr;
  }
  return std::shared_ptr<const FeedbackClaim>(new FeedbackClaim(rests, memory));
}

FeedbackClaim::~FeedbackClaim() {
  ClaimedRests& claimed = ClaimedRests::of_process();
  const std::lock_guard guard(claimed.lock);
  claimed.memory.erase(memory_);
}

Feedback::Feedback(std::shared_ptr<const FeedbackClaim> claim)
    : claim_(std::move(claim)), given_(claim_->rests()), next_(at::empty_like(given_.dense())) {}

void Feedback::add(std::size_t first, std::byte* values, std::size_t count) const {
  float* const to = floats(values);
  const float* const rest = floats(given_.data()) + first;
  for (std::size_t i = 0; i < count; ++i) to[i] += rest[i];
}

void Feedback::keep_loss(const QuantizedCall& call, std::size_t first, const std::byte* values,
                         const std::byte* encoded, std::size_t count, float weight) const {
  std::byte* const to = static_cast<std::byte*>(next_.data_ptr()) + first * sizeof(float);
  call.decode(to, encoded, count);
  const float* const given = floats(values);
  float* const rest = floats(to);
  for (std::size_t i = 0; i < count; ++i) {
    const float lost = (given[i] - rest[i]) * weight;
    rest[i] = std::isfinite(lost) ? lost : 0;  // NaN and infinite values arrive
  }
}

void Feedback::write_back() const {
  at::Tensor rests = claim_->rests();
  rests.copy_(next_);
}

QuantizedSum::QuantizedSum(const QuantizedCall& call, const at::Tensor& tensor,
                           std::shared_ptr<const FeedbackClaim> feedback, bool in_pieces)
    : call_(call),
      values_(tensor),
      parts_(values_.count(), call.members()),
      sizes_(sizes_to_owners(call, [this](std::size_t member) { return parts_.size(member); })),
      outgoing_(sizes_.outgoing),
      incoming_(sizes_.incoming),
      sum_({in_pieces ? 0 : call.bytes_of(parts_.size(call.own()))}),
      sums_(encoded_sizes()),
      in_pieces_(in_pieces),
      pieces_(pieces_of(values_.count(), call.members(), call.dtype())) {
  if (feedback != nullptr) feedback_.emplace(std::move(feedback));
}

std::vector<std::size_t> QuantizedSum::encoded_sizes() const {
  std::vector<std::size_t> sizes;
  for (std::size_t member = 0; member < call_.members(); ++member)
    sizes.push_back(call_.bytes_of(parts_.size(member)));
  return sizes;
}

QuantizedSum::PieceRange QuantizedSum::range(std::size_t member, int piece) const {
  const std::size_t size = parts_.size(member);
  const BlockParts cut(size, static_cast<std::size_t>(pieces_));
  const auto number = static_cast<std::size_t>(piece);
  return {.first = parts_.first(member) + cut.first(number),
          .count = cut.size(number),
          .encoded = call_.bytes_of(cut.first(number)),
          .encoded_bytes = call_.bytes_of(cut.size(number))};
}

ConstBytes QuantizedSum::encode(int member, int piece) {
  const auto to = static_cast<std::size_t>(member);
  const PieceRange at = range(to, piece);
  std::byte* const encoded = QuantizedCall::values_in(outgoing_[to]) + at.encoded;
  if (feedback_) feedback_->add(at.first, values(at), at.count);
  call_.encode(encoded, values(at), at.count);
  if (feedback_) feedback_->keep_loss(call_, at.first, values(at), encoded, at.count, 1);
  return {encoded, at.encoded_bytes};
}

MutableBytes QuantizedSum::values_from(int member, int piece) {
  const PieceRange at = range(call_.own(), piece);
  std::byte* const from = incoming_[static_cast<std::size_t>(member)];
  return {QuantizedCall::values_in(from) + at.encoded, at.encoded_bytes};
}

ConstBytes QuantizedSum::sum(int piece) {
  const PieceRange at = range(call_.own(), piece);
  std::byte* const encoded = own_sums() + at.encoded;
  if (feedback_) feedback_->add(at.first, values(at), at.count);
  std::vector<const std::byte*> pointers;
  const auto parts = parts_in(call_, incoming_, at.encoded, values(at), at.count, pointers);
  if (!feedback_) {
    collective::sum_and_encode(encoded, parts);
  } else {
    collective::sum_and_store(values(at), parts);
    call_.encode(encoded, values(at), at.count);
    feedback_->keep_loss(call_, at.first, values(at), encoded, at.count, call_.divisor());
  }
  return {encoded, at.encoded_bytes};
}

MutableBytes QuantizedSum::sums_from(int member, int piece) {
  const auto from = static_cast<std::size_t>(member);
  const PieceRange at = range(from, piece);
  return {sums_[from] + at.encoded, at.encoded_bytes};
}

void QuantizedSum::decode(int member, int piece) {
  const auto from = static_cast<std::size_t>(member);
  const PieceRange at = range(from, piece);
  call_.decode(values(at), sums_[from] + at.encoded, at.count);
}

WorkRef QuantizedSum::exchange(bool async) {
  for (std::size_t member = 0; member < call_.members(); ++member) {
    if (member == call_.own()) continue;
    call_.write_facts(outgoing_[member], values_.count());
    for (int piece = 0; piece < pieces_; ++piece) encode(static_cast<int>(member), piece);
  }
  return call_.all_to_all(incoming_, outgoing_, async);
}

Status QuantizedSum::add() {
  for (std::size_t member = 0; member < call_.members(); ++member) {
    if (member == call_.own()) continue;
    if (auto same = call_.compare(incoming_[member], member, values_.count()); !same.ok())
      return same;
  }
  for (int piece = 0; piece < pieces_; ++piece) sum(piece);
  return {};
}

void QuantizedSum::decode_all() {
  for (std::size_t member = 0; member < call_.members(); ++member)
    for (int piece = 0; piece < pieces_; ++piece) decode(static_cast<int>(member), piece);
}

void QuantizedSum::finish() const {
  values_.write_back();
  if (feedback_) feedback_->write_back();
}

}  // namespace muster::group
