// SPDX-License-Identifier: BSD-3-Clause
#include <c10/core/InferenceMode.h>

#include "core/group/call/dense_tensor.h"
#include "core/group/call/exchange.h"
#include "core/group/job.h"
#include "core/group/testing/ranks.h"
#include "core/group/world.h"
#include "core/trace/reader.h"

namespace muster::group {
namespace {

using testing::on_ranks;

TEST(PlainTensors, AreThoseWhoseMemoryCanBeUsedAsItIs) {
  const auto dense = torch::arange(12, torch::kFloat).reshape({3, 4});
  at::Tensor inferred;
  {
    const c10::InferenceMode mode;
    inferred = torch::ones({3});
  }
  for (const auto& [tensor, bytes] : std::vector<std::pair<at::Tensor, std::size_t>>{
           {dense, 48},
           {dense[1], 16},
           {torch::ones({2}).requires_grad_(), 8},
           {inferred, 12},
           {torch::empty({0}), 0},
           {torch::tensor(1.5), 4},
           {torch::ones({2}, torch::kComplexDouble), 32},
           {torch::ones({3}, torch::kBool), 3}}) {
    EXPECT_TRUE(is_dense_cpu(tensor)) << tensor.toString();
    EXPECT_EQ(dense_size(tensor), bytes);
    EXPECT_EQ(dense_bytes(tensor).data(), tensor.const_data_ptr());
    EXPECT_EQ(dense_mutable_bytes(tensor).data(), tensor.data_ptr());
  }
  const auto complex = torch::ones({2, 2}, torch::kComplexFloat);
  const auto negated = at::imag(complex.conj());
  ASSERT_TRUE(negated.is_neg());
  for (const auto& tensor :
       {at::Tensor(), dense.t(), dense.slice(1, 0, 2), complex.conj(), negated, dense.to_sparse(),
        dense.to(torch::kMeta), at::_efficientzerotensor({3}, torch::kFloat)}) {
    EXPECT_FALSE(is_dense_cpu(tensor)) << tensor.toString();
  }
}

// Dense calls are recorded under their names. A call that did not wait is recorded with a duration
// of 1 ns.
TEST(PlainCalls, AreRecorded) {
  on_ranks(2, [](int rank) {
    const auto latest = [] {
      const auto recorded = trace::read_trace(World::current().job("test")->recorder->path());
      EXPECT_TRUE(recorded.ok());
      return *recorded->latest();
    };
    exchange_text(default_group(), "mine");
    EXPECT_EQ(latest().name, "exchange_text");
    auto tensor = torch::ones({2, 3});
    broadcast(tensor, {.src = 0});
    const auto last = latest();
    EXPECT_EQ(last.name, "broadcast");
    EXPECT_EQ(last.bytes, 24u);
    EXPECT_EQ(last.state, trace::State::completed);
    EXPECT_GE(last.end_ns, last.start_ns + 1);
    EXPECT_TRUE(rank != 0 || last.end_ns == last.start_ns + 1) << last.end_ns - last.start_ns;
  });
}

}  // namespace
}  // namespace muster::group
