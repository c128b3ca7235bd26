// SPDX-License-Identifier: BSD-3-Clause
/// The steps of a compressed all_reduce, and its error feedback.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/bytes.h"
#include "core/collective/quantized/piece_sums.h"
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
  FeedbackClaim(const at::Tensor& rests, const void* memory) : rests_(rests), memory_(memory) {}
  const at::Tensor rests_;
  const void* const memory_;  // claimed; the tensor may be given other memory
};

/// Error feedback of a float32 all_reduce: what earlier calls lost is added to the values, and what
/// this one loses is kept, once it has succeeded: a call that fails leaves the rests as they were.
/// A part's loss is counted in units of the sum.
class Feedback {
 public:
  explicit Feedback(std::shared_ptr<const FeedbackClaim> claim);
  /// Adds what earlier calls lost of `count` values, the first of which is number `first`.
  void add(std::size_t first, std::byte* values, std::size_t count) const;
  /// Keeps what these values have lost in `encoded`.
  void keep_loss(const QuantizedCall& call, std::size_t first, const std::byte* values,
                 const std::byte* encoded, std::size_t count, float weight) const;
  /// After all values have gone through both.
  void write_back() const;

 private:
  const std::shared_ptr<const FeedbackClaim> claim_;
  const DenseCopy given_;
  const at::Tensor next_;  // on the CPU, as `given_`
};

/// An all_reduce between its steps. The engine runs the pieces, or they are run around an
/// all_to_all and an all_gather.
class QuantizedSum final : public collective::PieceSums {
 public:
  QuantizedSum(const QuantizedCall& call, const at::Tensor& tensor,
               std::shared_ptr<const FeedbackClaim> feedback, bool in_pieces);

  /// In pieces, by the engine. Then `finish`.
  WorkRef run(bool async) { return call_.all_reduce(values_.dense(), *this, async); }
  /// By two calls: `exchange`, `add`, `gather`, `decode_all`, `finish`.
  WorkRef exchange(bool async);
  Status add();
  WorkRef gather(bool async, const std::function<Status()>* prepare = nullptr) const {
    return call_.all_gather(sums_, sum_, async, prepare);
  }
  void decode_all();
  void finish() const;

  int pieces() const override { return pieces_; }
  ConstBytes encode(int member, int piece) override;
  MutableBytes values_from(int member, int piece) override;
  ConstBytes sum(int piece) override;
  MutableBytes sums_from(int member, int piece) override;
  void decode(int member, int piece) override;

 private:
  /// A piece: its values, the first of which is number `first`, and the place of their encoding in
  /// that of the part.
  struct PieceRange {
    std::size_t first, count, encoded, encoded_bytes;
  };
  PieceRange range(std::size_t member, int piece) const;
  std::byte* values(const PieceRange& range) const {
    return values_.data() + range.first * size_of(call_.dtype());
  }
  std::byte* own_sums() const { return in_pieces_ ? sums_[call_.own()] : sum_[0]; }
  std::vector<std::size_t> encoded_sizes() const;

  const QuantizedCall call_;
  const DenseCopy values_;
  const BlockParts parts_;
  const MessageSizes sizes_;
  const ByteMessages outgoing_, incoming_, sum_, sums_;
  const bool in_pieces_;
  const int pieces_;
  std::optional<Feedback> feedback_;
};

}  // namespace muster::group
