// SPDX-License-Identifier: BSD-3-Clause
#include <cstdlib>
#include <new>

#include "core/group/calls.h"
#include "core/group/group_core.h"
#include "core/group/job.h"
#include "core/group/testing/ranks.h"
#include "core/group/world.h"
#include "core/trace/reader.h"
#include "muster/collectives.h"

// Counts this thread's heap allocations on request. Sanitizers have their own operator new.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MUSTER_COUNTS_ALLOCATIONS 1
namespace {
thread_local bool counting = false;
thread_local std::size_t taken = 0;
}  // namespace
void* operator new(std::size_t size) {
  if (counting) ++taken;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;
using testing::reduced;
using testing::values;

// A prepared call is submitted repeatedly, uses the tensors' current values, and mixes with
// ordinary calls.
TEST(PreparedCalls, StartAsOftenAsOneLikes) {
  for (const char* backend : {"native", "tcp"}) {
    on_ranks(
        3,
        [](int rank) {
          const auto group = default_group();
          auto tensor = torch::zeros({5});
          auto sum =
              core_of(group).prepare(calls::all_reduce(*group, tensor, {.op = ReduceOp::SUM}));
          auto strided = torch::zeros({4, 3}).t();
          auto turned =
              core_of(group).prepare(calls::all_reduce(*group, strided, {.op = ReduceOp::MAX}));
          auto parts = torch::zeros({3, 2});
          const auto mine = torch::zeros({2});
          auto gathered =
              core_of(group).prepare(calls::all_gather_into_tensor(*group, parts, mine, {}));
          auto later =
              core_of(group).prepare(calls::all_reduce(*group, tensor, {.async_op = true}));
          for (int round = 0; round < 20; ++round) {
            tensor.fill_(rank + round);
            EXPECT_EQ(sum.submit(), nullptr);
            EXPECT_SAME(tensor, torch::full({5}, 3.0f * static_cast<float>(round) + 3));
            strided.fill_(rank * round);
            turned.submit();
            EXPECT_SAME(strided, torch::full({3, 4}, 2.0f * static_cast<float>(round)));
            mine.fill_(10 * round + rank);
            gathered.submit();
            EXPECT_EQ(parts[2][0].item<float>(), 10 * round + 2);
            barrier();
            tensor.fill_(1);
            later.submit()->wait();
            EXPECT_SAME(tensor, torch::full({5}, 3.0f));
          }
        },
        backend);
  }
}

// Checked by prepare; does nothing on a non-member.
TEST(PreparedCalls, AreCheckedWhenTheyAreMade) {
  on_ranks(3, [](int rank) {
    const auto world = default_group();
    EXPECT_HAS(message_of<DistError>(
                   [&] { core_of(world).prepare(calls::all_reduce(*world, at::Tensor(), {})); }),
               "undefined");
    const auto group = new_group({.ranks = std::vector<int>{0, 2}});
    auto tensor = torch::ones({2});
    auto call = core_of(group).prepare(calls::all_reduce(*group, tensor, {}));
    call.submit();
    EXPECT_SAME(tensor, torch::full({2}, rank == 1 ? 1.0f : 2.0f));
  });
}

// A receive from any rank is asynchronous: each round needs its own call.
TEST(PreparedCalls, ReceiveFromAnyRankAgainAndAgain) {
  for (const char* backend : {"native", "tcp"}) {
    on_ranks(
        2,
        [](int rank) {
          const auto group = default_group();
          auto dense = torch::zeros({3}), strided = torch::zeros({3, 2}).t();
          for (auto& tensor : {dense, strided}) {
            auto received = core_of(group).prepare(calls::recv(*group, tensor, {}, "recv", false));
            for (int round = 1; round < 4; ++round) {
              if (rank == 0) {
                send(torch::full(tensor.sizes(), static_cast<float>(round)), {.dst = 1});
                continue;
              }
              EXPECT_EQ(received.submit()->source_rank(), 0);
              EXPECT_SAME(tensor, torch::full(tensor.sizes(), static_cast<float>(round)));
            }
          }
        },
        backend);
  }
}

// A call's record outlives its tensors; for splits, only views are held.
TEST(PreparedCalls, KeepTheShapeThatIsRecorded) {
  on_ranks(2, [](int) {
    const auto group = default_group();
    auto input = torch::ones({4, 3}), output = torch::zeros({4, 3});
    const auto* const theirs = input.sizes().data();
    const AllToAllSingleOptions equal;
    Call call = calls::all_to_all_single(*group, output, input, equal);
    EXPECT_EQ(call.record.traced.shape.data(), theirs);
    call.hold();
    EXPECT_NE(call.record.traced.shape.data(), theirs);
    const Call again = call.again();
    EXPECT_NE(again.record.traced.shape.data(), call.record.traced.shape.data());
    auto prepared = core_of(group).prepare(std::move(call));
    input.reset();
    output.reset();
    prepared.submit();
    const auto recorded = trace::read_trace(World::current().job("test")->recorder->path());
    ASSERT_TRUE(recorded.ok()) << recorded.status().message();
    EXPECT_EQ(recorded->latest()->name, "all_to_all_single");
    EXPECT_EQ(recorded->latest()->shape, (std::vector<std::int64_t>{4, 3}));
  });
}

#ifdef MUSTER_COUNTS_ALLOCATIONS
// After the first few submissions nothing is allocated, for sizes that fit the line, the slot and
// neither.
TEST(PreparedCalls, TakeNoMemoryOnceTheyRun) {
  on_ranks(2, [](int) {
    const auto group = default_group();
    for (const std::int64_t elements : {1, 1000, 100000}) {
      auto tensor = torch::zeros({elements});
      auto whole = torch::zeros({2, elements});
      PreparedCall prepared[] = {prepare_all_reduce(tensor, {.group = group}),
                                 prepare_broadcast(tensor, {.src = 0, .group = group}),
                                 prepare_all_gather_into_tensor(whole, tensor, {.group = group}),
                                 prepare_reduce_scatter_tensor(tensor, whole, {.group = group})};
      for (auto& call : prepared) {
        for (int i = 0; i < 20; ++i) call.submit();
        std::size_t least = 1000000;  // in ten rounds: a rank that has to sleep may allocate
        for (int round = 0; round < 10; ++round) {
          taken = 0;
          counting = true;
          for (int i = 0; i < 20; ++i) call.submit();
          counting = false;
          least = std::min(least, taken);
        }
        EXPECT_EQ(least, 0u) << elements << " elements, call " << &call - prepared;
      }
    }
  });
}
#endif

}  // namespace
}  // namespace muster
