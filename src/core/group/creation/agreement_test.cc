// SPDX-License-Identifier: BSD-3-Clause
// Mismatched calls: every pair of different calls, with ranks as threads and as processes.
#include <unistd.h>

#include <atomic>

#include "core/group/testing/ranks.h"
#include "muster/objects.h"
#include "testing/limits.h"
#include "testing/needs_all_wings.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;

struct GroupCall {
  const char* op;      ///< the call's name in errors
  const char* detail;  ///< other details in errors
  std::function<void(int rank, const Group& group)> make;
};

TensorList tensors(int count, int elements) {
  TensorList list;
  for (int i = 0; i < count; ++i) list.push_back(torch::zeros({elements}));
  return list;
}
TensorList only(bool wanted, const TensorList& list) { return wanted ? list : TensorList{}; }

/// Every collective, and all_reduce and broadcast with another dtype, op, root and size. Any two of
/// them mismatch.
const std::vector<GroupCall>& all_calls() {
  static const std::vector<GroupCall> all{
      {"all_reduce", "SUM, float32, 4",
       [](int, const Group& g) { all_reduce(torch::zeros({4}), {.group = g}); }},
      {"all_reduce", "MAX, float32, 4",
       [](int, const Group& g) {
         all_reduce(torch::zeros({4}), {.op = ReduceOp::MAX, .group = g});
       }},
      {"all_reduce", "SUM, int32, 4",
       [](int, const Group& g) { all_reduce(torch::zeros({4}, at::kInt), {.group = g}); }},
      {"all_reduce", "SUM, float32, 5",
       [](int, const Group& g) { all_reduce(torch::zeros({5}), {.group = g}); }},
      {"all_reduce", "SUM, float32, 400000",
       [](int, const Group& g) { all_reduce(torch::zeros({400000}), {.group = g}); }},
      {"broadcast", "root 0",
       [](int, const Group& g) { broadcast(torch::zeros({4}), {.group = g, .group_src = 0}); }},
      {"broadcast", "root 1",
       [](int, const Group& g) { broadcast(torch::zeros({4}), {.group = g, .group_src = 1}); }},
      {"reduce", "root 0",
       [](int, const Group& g) { reduce(torch::zeros({4}), {.group = g, .group_dst = 0}); }},
      {"reduce", "root 2",
       [](int, const Group& g) { reduce(torch::zeros({4}), {.group = g, .group_dst = 2}); }},
      {"all_gather", "12 elements",
       [](int, const Group& g) { all_gather(tensors(3, 4), torch::zeros({4}), {.group = g}); }},
      {"gather", "root 0",
       [](int rank, const Group& g) {
         gather(torch::zeros({4}),
                {.gather_list = only(rank == 0, tensors(3, 4)), .group = g, .group_dst = 0});
       }},
      {"scatter", "root 0",
       [](int rank, const Group& g) {
         scatter(torch::zeros({4}),
                 {.scatter_list = only(rank == 0, tensors(3, 4)), .group = g, .group_src = 0});
       }},
      {"reduce_scatter", "12 elements",
       [](int, const Group& g) { reduce_scatter(torch::zeros({4}), tensors(3, 4), {.group = g}); }},
      {"all_to_all", "float32",
       [](int, const Group& g) { all_to_all(tensors(3, 4), tensors(3, 4), {.group = g}); }},
      {"barrier", "", [](int, const Group& g) { barrier({.group = g}); }},
      {"all_gather", "uint8",
       [](int rank, const Group& g) {
         std::vector<int> list(3);
         all_gather_object(list, rank, {.group = g});
       }},
  };
  return all;
}

/// Rank `odd` of three calls `b` and the others `a`. Returns what is wrong with rank `rank`'s
/// error; empty if it is as expected.
std::string fault_of(int rank, int odd, const GroupCall& a, const GroupCall& b,
                     const Group& group) {
  const auto pair = std::string(a.op) + "(" + a.detail + ") and, on rank " + std::to_string(odd) +
                    ", " + b.op + "(" + b.detail + "): rank " + std::to_string(rank);
  try {
    (rank == odd ? b : a).make(rank, group);
    for (int next = 0; next < 3; ++next)
      barrier({.group = group});  // a rank that had returned learns it at its next call
  } catch (const DistError& error) {
    const std::string text = error.what();
    if (error.code() != Code::mismatch) return pair + " failed otherwise: " + text + "\n";
    for (const auto* part : {a.op, a.detail, b.op, b.detail})
      if (text.find(part) == std::string::npos)
        return pair + " does not name '" + part + "': " + text + "\n";
    if (std::find(error.ranks().begin(), error.ranks().end(), odd) == error.ranks().end())
      return pair + " does not name rank " + std::to_string(odd) + ": " + text + "\n";
    return {};
  }
  return pair + " saw nothing\n";
}

/// All pairs; rank 0 or rank 2 differs.
std::string faults_of(int rank) {
  std::string faults;
  for (std::size_t i = 0; i < all_calls().size(); ++i)
    for (std::size_t j = 0; j < all_calls().size(); ++j) {
      if (i == j) continue;
      const auto group = new_group({.timeout = muster::testing::kMustHappen});
      faults += fault_of(rank, i < j ? 2 : 0, all_calls()[i], all_calls()[j], group);
    }
  return faults;
}

// spec: F18 different collectives, dtype, op, root, size on native: DistError on every rank naming
// the two calls and ranks, at the next call of a rank that had returned
TEST(Agreement, EveryPairOfDifferentCallsIsNamedOnEveryRank) {
  for (const char* backend : {"native", "tcp"})
    on_ranks(
        3, [](int rank) { EXPECT_EQ(faults_of(rank), ""); }, backend);
}

// spec: F18 between processes
TEST(Agreement, EveryPairOfDifferentCallsIsNamedBetweenProcesses) {
  NEEDS_ALL_WINGS();
  for (const char* backend : {"native", "tcp"}) {
    const auto path =
        ::testing::TempDir() + "muster-agreement-" + std::to_string(::getpid()) + "-" + backend;
    spawn(
        [&](int rank) {
          init_process_group({.backend = backend,
                              .init_method = "file://" + path,
                              .timeout = muster::testing::kMustHappen,
                              .world_size = 3,
                              .rank = rank});
          if (const auto faults = faults_of(rank); !faults.empty())
            throw std::runtime_error(faults);
          destroy_process_group();
        },
        {.nprocs = 3});
  }
}

// spec: F18 a rank that had already returned learns it at wait
TEST(Agreement, AsynchronousCallsLearnItAtWait) {
  on_ranks(2, [](int rank) {
    auto work = rank == 0 ? all_reduce(torch::zeros({4}), {.async_op = true})
                          : all_gather(tensors(2, 4), torch::zeros({4}), {.async_op = true});
    const auto text = message_of<DistBackendError>([&] { work->wait(); });
    EXPECT_HAS(text, "all_reduce");
    EXPECT_HAS(text, "all_gather");
    EXPECT_HAS(text, "rank 0");
    EXPECT_HAS(text, "rank 1");
  });
}

// spec: F18 a rank that had already returned learns it at destroy
TEST(Agreement, ReturnedRanksLearnItAtDestroy) {
  for (const char* backend : {"native", "tcp"}) {
    std::atomic<int> named{0};
    const auto store = std::make_shared<HashStore>();
    const auto ranks = [&](int rank) {
      init_process_group({.backend = backend,
                          .timeout = muster::testing::kMustHappen,
                          .world_size = 3,
                          .rank = rank,
                          .store = store});
      const auto expect = [&](auto call) {
        try {
          call();
        } catch (const DistError& error) {
          EXPECT_EQ(error.code(), Code::mismatch);
          EXPECT_HAS(error.what(), "broadcast(float32, 1 element, root 0)");
          EXPECT_HAS(error.what(), "broadcast(float32, 2 elements, root 0)");
          ++named;
          return true;
        }
        return false;
      };
      // A small broadcast's root returns immediately.
      const bool told = expect([&] { broadcast(torch::zeros({rank == 2 ? 2 : 1}), {.src = 0}); });
      if (told) return destroy_process_group();
      expect([] { destroy_process_group(); });
    };
    spawn(ranks, {.nprocs = 3, .mode = SpawnMode::threads});
    EXPECT_EQ(named.load(), 3) << backend;
  }
}

// spec: F18 a skipped call that leaves identical ones is named at the deadline
TEST(Agreement, SkippedCallIsNamedAtTheDeadline) {
  for (const char* backend : {"native", "tcp"}) {
    testing::RankLatch over(1);
    on_ranks(
        2,
        [&](int rank) {
          auto tensor = torch::zeros({4});
          all_reduce(tensor);
          if (rank == 1) {  // it should have made two
            over.wait();
            const auto text = message_of<DistBackendError>([] { barrier(); });
            EXPECT_HAS(text,
                       "all_reduce(SUM, float32, 4 elements)");  // rank 0's deadline, or that rank
                                                                 // 0 was still in the call
            return;
          }
          try {
            all_reduce(tensor, {.timeout = std::chrono::milliseconds(300)});
            ADD_FAILURE() << "nobody else made this call";
          } catch (const DistBackendError& error) {
            EXPECT_EQ(error.code(), Code::timed_out);
            EXPECT_EQ(error.ranks(), std::vector<int>{1});
            EXPECT_HAS(error.what(), "all_reduce(SUM, float32, 4 elements), call 2");
            EXPECT_HAS(error.what(), "rank 1");
          }
          over.count_down();
        },
        backend);
  }
}

}  // namespace
}  // namespace muster
