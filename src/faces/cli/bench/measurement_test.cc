// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>

#include "faces/cli/bench/measurement.h"

namespace muster::cli::bench {
namespace {

constexpr std::int64_t kLag = 10'000'000'000;  // ns; longer than any call here

/// Rank 0 of two, whose call takes no time. Rank 1 begins and ends `lag` nanoseconds after it.
class Pair final : public TimedRank {
 public:
  explicit Pair(std::int64_t lag) : lag_(lag) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  Status prepare(const Cell& cell) override {
    from_ = cell.from;
    return {};
  }
  MutableBytes written() override { return {}; }
  Status call() override { return {}; }
  Status barrier() override { return {}; }
  Status share(std::int64_t&) override { return {}; }
  Status latest(std::span<std::int64_t> values) override {
    for (std::size_t i = 0; i < values.size(); i += 2) {
      const std::int64_t began = from_ == CountFrom::first_start ? -lag_ : lag_;
      if (from_ == CountFrom::own_start) continue;  // as long on either
      values[i] = std::max(values[i], values[i] + began);
      values[i + 1] = std::max(values[i + 1], values[i + 1] + lag_);
    }
    return {};
  }

 private:
  const std::int64_t lag_;
  CountFrom from_ = CountFrom::last_start;
};

double microseconds(std::int64_t lag, CountFrom from) {
  Pair pair(lag);
  return measure(pair, {.op = "broadcast", .bytes = 8, .seconds = 1e-6, .from = from})->p50_us;
}

TEST(BenchWorker, ACallCountsFromTheStartThatWasAskedFor) {
  for (const std::int64_t lag : {kLag, -kLag}) {  // whichever rank is first
    EXPECT_GE(microseconds(lag, CountFrom::first_start), kLag / 1000);
    EXPECT_LT(microseconds(lag, CountFrom::last_start), kLag / 1000);
    EXPECT_LT(microseconds(lag, CountFrom::own_start), kLag / 1000);
  }
}

}  // namespace

}  // namespace muster::cli::bench
