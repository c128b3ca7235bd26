/// A rank that is measured: what every library's worker of ours does with an order.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/base/bytes.h"
#include "faces/cli/bench/cell.h"
#include "muster/status.h"

namespace muster::cli::bench {

/// One rank of something that can be measured. One thread.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Gets ready for calls of the cell, with memory of its kind. Code::unsupported where there is no
  /// such operation.
  virtual Status prepare(const Cell& cell) = 0;
  /// What this rank rewrites before each call.
  virtual MutableBytes written() = 0;
  virtual Status call() = 0;

  // For the measurement itself.
  virtual Status barrier() = 0;
  /// Rank 0's value goes to all.
  virtual Status share(std::int64_t& value) = 0;
  /// The greatest of all ranks' values, place by place, for all.
  virtual Status latest(std::span<std::int64_t> values) = 0;
};

/// Measures one cell; all ranks together.
Result<Figures> measure(Subject& subject, const Cell& cell);

/// Carries out the orders in `folder`, or of the standard input where that is empty (see cell.h),
/// until they end. A rank that has a core of its own stays on it: bound from here on.
Status serve(Subject& subject, const std::string& folder);

}  // namespace muster::cli::bench
