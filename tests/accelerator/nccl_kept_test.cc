// SPDX-License-Identifier: BSD-3-Clause
// Threads that do not come back from ncclGroupEnd: the rest of the process goes on, or fails by
// deadlines of its own.
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "nccl_ranks.h"

namespace muster::testing {
namespace {

using std::chrono::milliseconds;

void send_on(int rank, const Group& group) {
  const auto tensor = rank == 0 ? some(0) : deferred::on_device(torch::zeros({4}), 1);
  (rank == 0 ? isend(tensor, {.dst = 1, .group = group})
             : irecv(tensor, {.src = 0, .group = group}))
      ->wait();
  EXPECT_SAME(tensor.cpu(), values(0, {4}));
}

// spec: B4.abort a thread that NCCL keeps in a message holds up no other group of its device for
// longer than that group's own timeouts, and no destroy
TEST(NcclKept, AThreadInAMessageHoldsUpNoOtherGroup) {
  const Variable kept("NCCL_STANDIN_KEPT", "0:2");
  on_failing_ranks(2, [](int rank) {
    const auto messages = new_group({.timeout = milliseconds(300)}), other = new_group();
    send_on(rank, messages);
    all_reduce(some(rank), {.group = other});
    barrier();  // of the CPU's backend
    const auto tensor = some(rank);
    const auto work = rank == 0 ? isend(tensor, {.dst = 1, .group = messages})
                                : irecv(tensor, {.src = 0, .group = messages});
    ASSERT_TRUE(comes_true([] { return kept_threads() == 1; }));
    const auto text =
        told([&] { all_reduce(some(rank), {.group = other, .timeout = milliseconds(900)}); });
    EXPECT_HAS(text, "all_reduce number 2");
    EXPECT_HAS(text, "within 900 ms");
    EXPECT_HAS(told([&] { work->wait(); }), "within 300 ms");
  });
  EXPECT_EQ(kept_threads(), 1) << "both groups were destroyed meanwhile";
  // It comes back to what has gone.
  release_kept_threads();
  ASSERT_TRUE(comes_true([] { return kept_threads() == 0; }));
  on_nccl_ranks(2, [](int rank) {
    send_on(rank, default_group());
    const auto sum = deferred::on_device(torch::ones({4}), rank);
    all_reduce(sum);
    EXPECT_SAME(sum.cpu(), torch::full({4}, 2.0F));
  });
}

}  // namespace
}  // namespace muster::testing
