// SPDX-License-Identifier: BSD-3-Clause
/// Runs ranks as threads through the public interface, for this folder's tests.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/base/process/interruption.h"
#include "muster/distributed.h"
#include "testing/limits.h"
#include "testing/thrown.h"

namespace muster::testing {

/// Runs `body(rank)` on `count` ranks of one job, between init and destroy.
inline void on_ranks(int count, const std::function<void(int)>& body,
                     const std::optional<std::string>& backend = {}) {
  const auto store = std::make_shared<HashStore>();
  const auto rank_body = [&](int rank) {
    init_process_group({.backend = backend,
                        .timeout = muster::testing::kMustHappen,
                        .world_size = count,
                        .rank = rank,
                        .store = store});
    body(rank);
    destroy_process_group();
  };
  spawn(rank_body, {.nprocs = count, .mode = SpawnMode::threads});
}

/// A `std::latch` for ranks of `on_ranks`. If a rank fails and therefore may never count down, the
/// other ranks' waits throw.
class RankLatch {
 public:
  explicit RankLatch(int count) : left_(count) {}
  void count_down() {
    const std::lock_guard guard(lock_);
    if (--left_ == 0) open_.notify_all();
  }
  void wait() {
    const Duration look = std::min<Duration>(Interruption::look_every(), std::chrono::seconds(1));
    std::unique_lock guard(lock_);
    while (!open_.wait_for(guard, look, [this] { return left_ <= 0; })) {
      if (const Status failed = Interruption::of_thread(); !failed) throw DistError(failed);
    }
  }

 private:
  std::mutex lock_;
  std::condition_variable open_;
  int left_;
};

#define EXPECT_SAME(a, b) EXPECT_TRUE(torch::equal(a, b)) << (a) << "\nand\n" << (b)

/// The input of rank `rank` in most tests: small integers of any type, different on every rank.
inline at::Tensor values(int rank, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  const auto count = c10::multiply_integers(shape);
  auto numbers = (torch::arange(count, at::kLong) * 3 + rank * 5).remainder(7) + 1;
  if (dtype == at::kBool) return numbers.remainder(2).to(at::kBool).view(shape);
  auto out = numbers.to(c10::isComplexType(dtype) ? at::kDouble : dtype);
  if (c10::isComplexType(dtype)) out = torch::complex(out, out * 2 - 3).to(dtype);
  return out.view(shape);
}

inline const std::vector<at::ScalarType> kReducible{
    at::kBool, at::kByte,     at::kChar,  at::kShort,  at::kInt,          at::kLong,
    at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};
inline const std::vector<at::ScalarType> kMovable{
    at::kFloat8_e5m2,     at::kFloat8_e4m3fn,  at::kFloat8_e5m2fnuz,
    at::kFloat8_e4m3fnuz, at::kFloat8_e8m0fnu, at::kUInt16,
    at::kUInt32,          at::kUInt64,         at::kComplexHalf};

/// Bytes unique to the rank, viewed as any type.
inline at::Tensor raw(int rank, std::int64_t elements, at::ScalarType dtype) {
  const auto bytes = static_cast<std::int64_t>(c10::elementSize(dtype)) * elements;
  return (torch::arange(bytes, torch::kInt64) * 7 + rank * 31)
      .remainder(251)
      .to(torch::kUInt8)
      .view(dtype);
}
inline bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return torch::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

/// All elements as one dimension, detached.
inline at::Tensor flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  parts.reserve(tensors.size());
  for (const auto& tensor : tensors) parts.push_back(tensor.detach().reshape({-1}));
  return torch::cat(parts);
}

/// The reduction of values(0..n-1) in rank order, computed by torch.
inline at::Tensor reduced(int ranks, at::IntArrayRef shape, at::ScalarType dtype, ReduceOp op) {
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto wide = narrow ? at::kFloat : dtype;
  at::Tensor sum;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto next = values(rank, shape, dtype).to(wide);
    if (!sum.defined()) {
      sum = next.clone();
      continue;
    }
    switch (op.kind()) {
      case ReduceOp::PRODUCT: sum = sum * next; break;
      case ReduceOp::MIN: sum = torch::minimum(sum, next); break;
      case ReduceOp::MAX: sum = torch::maximum(sum, next); break;
      case ReduceOp::BAND: sum = torch::bitwise_and(sum, next); break;
      case ReduceOp::BOR: sum = torch::bitwise_or(sum, next); break;
      case ReduceOp::BXOR: sum = torch::bitwise_xor(sum, next); break;
      default: sum = dtype == at::kBool ? torch::logical_or(sum, next) : sum + next; break;
    }
  }
  if (op == ReduceOp::AVG)
    sum = c10::isIntegralType(dtype, false) ? torch::div(sum, ranks, "trunc") : sum / ranks;
  return sum.to(dtype);
}

}  // namespace muster::testing
