// SPDX-License-Identifier: BSD-3-Clause
/// The operations of a group, and the reduction of those that reduce.
#pragma once

#include <cstdint>

namespace muster {

/// Identifies the operation of a call, for a backend.
enum class Op : std::uint8_t {
  broadcast,
  all_reduce,
  reduce,
  all_gather,
  gather,
  scatter,
  reduce_scatter,
  all_to_all,
  barrier,
  send,
  recv,
};
/// A point-to-point message, not a call of the group.
constexpr bool is_message(Op op) { return op == Op::send || op == Op::recv; }

/// torch's ReduceOp, including the factor of PREMUL_SUM.
class ReduceOp {
 public:
  enum Kind { SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR, AVG, PREMUL_SUM };

  constexpr ReduceOp(Kind kind = SUM) : kind_(kind) {}
  /// Multiplies each rank's input by that rank's `factor`, then sums (torch's
  /// _make_nccl_premul_sum).
  static constexpr ReduceOp premul_sum(double factor) {
    ReduceOp op(PREMUL_SUM);
    op.factor_ = factor;
    return op;
  }

  constexpr Kind kind() const { return kind_; }
  constexpr double factor() const { return factor_; }
  constexpr bool operator==(const ReduceOp&) const = default;

 private:
  Kind kind_;
  double factor_ = 1.0;
};

/// torch's deprecated spelling of ReduceOp; it has only these four.
struct reduce_op {
  static constexpr ReduceOp SUM{ReduceOp::SUM};
  static constexpr ReduceOp PRODUCT{ReduceOp::PRODUCT};
  static constexpr ReduceOp MIN{ReduceOp::MIN};
  static constexpr ReduceOp MAX{ReduceOp::MAX};
};

}  // namespace muster
