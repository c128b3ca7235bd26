/// The reduction operation: torch's ReduceOp, including the factor of PREMUL_SUM.
#pragma once

#include "muster/collective/op.h"

namespace muster {

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
  constexpr collective::Reduce engine() const { return static_cast<collective::Reduce>(kind_); }
  constexpr bool operator==(const ReduceOp&) const = default;

 private:
  Kind kind_;
  double factor_ = 1.0;
};
static_assert(ReduceOp(ReduceOp::PREMUL_SUM).engine() == collective::Reduce::premul_sum);
static_assert(ReduceOp(ReduceOp::BAND).engine() == collective::Reduce::band);

/// torch's deprecated spelling of ReduceOp; it has only these four.
struct reduce_op {
  static constexpr ReduceOp SUM{ReduceOp::SUM};
  static constexpr ReduceOp PRODUCT{ReduceOp::PRODUCT};
  static constexpr ReduceOp MIN{ReduceOp::MIN};
  static constexpr ReduceOp MAX{ReduceOp::MAX};
};

}  // namespace muster
