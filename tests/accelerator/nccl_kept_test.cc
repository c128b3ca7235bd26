// SPDX-License-Identifier: BSD-3-Clause
// Threads that do not come back from ncclGroupEnd: the rest of the process goes on, or fails by
// deadlines of its own.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <utility>

#include "core/group/group_core.h"
#include "core/tunables/tunables.h"
#include "nccl_ranks.h"

namespace muster::testing {
namespace {

using std::chrono::milliseconds;

/// How long aborts wait for threads and for NCCL while it lives.
class AbortGrace {
 public:
  explicit AbortGrace(Duration grace)
      : usual_(std::exchange(tunables_detail::in_force.nccl_abort_grace, grace)) {}
  ~AbortGrace() { tunables_detail::in_force.nccl_abort_grace = usual_; }
  AbortGrace(const AbortGrace&) = delete;

 private:
  const Duration usual_;
};

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

// spec: B4 E1 the error of a message that its own rank's thread has not got to, since NCCL keeps
// it, does not say that its peer had not called
TEST(NcclKept, APeerThatHasCalledIsNotBlamed) {
  const Variable kept("NCCL_STANDIN_KEPT", "0:1");
  on_failing_ranks(3, [](int rank) {
    const auto group = new_group({.ranks = std::vector<int>{0, 2}}),
               first = new_group({.timeout = std::chrono::seconds(3)});
    const auto tensor = some(rank), other = some(rank);
    WorkRef held, work;
    if (rank < 2)
      held = rank == 0 ? isend(tensor, {.dst = 1, .group = first})
                       : irecv(tensor, {.src = 0, .group = first});
    if (rank == 0) {
      ASSERT_TRUE(comes_true([] { return kept_threads() == 1; }));
    }
    barrier();  // of the CPU's backend
    if (rank == 2) work = irecv(other, {.src = 0, .group = group});
    if (rank == 0) {
      work = isend(other, {.dst = 2, .group = group, .timeout = milliseconds(500)});
      const auto text = told([&] { work->wait(); });
      EXPECT_HAS(text, "isend on group");
      EXPECT_HAS(text, "the thread that launches its device's messages had not got to it");
    }
  });
  release_kept_threads();
  ASSERT_TRUE(comes_true([] { return kept_threads() == 0; }));
}

// spec: B4.abort D7 a thread that NCCL keeps in a message does not keep collectives from being
// revoked, so that survivors can shrink
TEST(NcclKept, AThreadInAMessageLeavesCollectivesToBeRevoked) {
  const AbortGrace grace(std::chrono::seconds(1));
  const Variable kept("NCCL_STANDIN_KEPT", "0:3");
  on_failing_ranks(2, [](int rank) {
    static RankLatch ended(2), counted(2);
    all_reduce(some(rank));
    const auto alone = some(rank);  // in flight until it is revoked: rank 1 does not call it
    WorkRef sum;
    if (rank == 0) sum = all_reduce(alone, {.async_op = true});
    for (int i = 0; i < 2; ++i) send_on(rank, default_group());
    const auto tensor = some(rank);
    const auto work = rank == 0 ? isend(tensor, {.dst = 1}) : irecv(tensor, {.src = 0});
    ASSERT_TRUE(comes_true([] { return kept_threads() == 1; }));
    const int before = standin_calls("ncclCommAbort");
    barrier();  // of the CPU's backend
    if (rank == 0) core_of(default_group()).abort("enough of it");
    EXPECT_HAS(told([&] { work->wait(); }), "enough of it");
    ended.count_down();
    ended.wait();
    EXPECT_EQ(standin_calls("ncclCommAbort") - before, 1) << "of the messages, on rank 1";
    counted.count_down();
    counted.wait();
  });
  release_kept_threads();
  ASSERT_TRUE(comes_true([] { return kept_threads() == 0; }));
}

// spec: B4.abort B10 memory that a kernel of NCCL still uses when its group has been destroyed in
// vain is never freed
TEST(NcclKept, WhatAKernelUsesAfterDestroyIsNotFreed) {
  const AbortGrace grace(milliseconds(300));
  const Variable deaf("NCCL_STANDIN_DEAF", "0:1");
  on_failing_ranks(2, [](int rank) {
    const auto group = new_group({.timeout = milliseconds(500)});
    auto tensor = some(rank);
    auto work = all_reduce(
        tensor, {.group = group, .async_op = true, .timeout = muster::testing::kMustHappen * 10});
    ASSERT_TRUE(comes_true([] { return kept_threads() == 1; }));
    const auto memory = tensor.storage().getWeakStorageImpl();
    EXPECT_NE(text_of([&] { destroy_process_group(group); }), "");
    EXPECT_NE(work->exception(), nullptr);
    work.reset();
    tensor.reset();
    if (rank == 0) {
      EXPECT_FALSE(memory.expired());
    }
  });
  release_kept_threads();
  ASSERT_TRUE(comes_true([] { return kept_threads() == 0; }));
}

}  // namespace
}  // namespace muster::testing
