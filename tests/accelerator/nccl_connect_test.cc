// SPDX-License-Identifier: BSD-3-Clause
// Groups whose ranks connect by several ids (scalable init). NCCL is the stand-in
// (nccl_standin/standin.cc), in which ranks with other lists of ids do not meet.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backends/nccl/link_exchange.h"
#include "backends/nccl/nccl_backend.h"
#include "nccl_ranks.h"

namespace muster::testing {
namespace {

/// Connects so many ranks, and returns how often that called a function of NCCL.
class Connected {
 public:
  explicit Connected(int ranks) {
    use_standin();
    before_ = counts();
    on_nccl_ranks(ranks, [ranks](int rank) {
      const auto tensor = some(rank);
      all_reduce(tensor);
      EXPECT_SAME(tensor.cpu(), reduced(ranks, {4}, at::kFloat, ReduceOp::SUM));
    });
  }
  int by_one() const { return counts()[0] - before_[0]; }
  int by_several() const { return counts()[1] - before_[1]; }
  int ids() const { return counts()[2] - before_[2]; }

 private:
  static std::vector<int> counts() {
    return {standin_calls("ncclCommInitRankConfig"), standin_calls("ncclCommInitRankScalable"),
            standin_calls("ncclGetUniqueId")};
  }
  std::vector<int> before_;
};

// spec: A3 B4.env a group of more ranks than one id is to serve connects by several, each made by
// the first of its ranks; a smaller one by one
TEST(NcclConnect, LargeGroupsConnectBySeveralIds) {
  {
    const Connected small(3);
    EXPECT_EQ(small.by_one(), 3);
    EXPECT_EQ(small.ids(), 1);
  }
  const Variable few("TORCH_NCCL_RANKS_PER_ROOT", "2");
  {
    const Connected fits(2);
    EXPECT_EQ(fits.by_one(), 2);
  }
  const Connected large(5);
  EXPECT_EQ(large.by_one(), 0);
  EXPECT_EQ(large.by_several(), 5);
  EXPECT_EQ(large.ids(), 3);
}

// spec: A3 messages connect by one id whatever the variable says
TEST(NcclConnect, MessagesConnectByOneId) {
  const Variable few("TORCH_NCCL_RANKS_PER_ROOT", "1");
  use_standin();
  const int before = standin_calls("ncclCommInitRankScalable");
  on_nccl_ranks(2, [](int rank) {
    const auto tensor = rank == 0 ? some(0) : deferred::on_device(torch::zeros({4}), 1);
    (rank == 0 ? isend(tensor, {.dst = 1}) : irecv(tensor, {.src = 0}))->wait();
    EXPECT_SAME(tensor.cpu(), values(0, {4}));
  });
  EXPECT_EQ(standin_calls("ncclCommInitRankScalable"), before);
}

// spec: B4.env a number that cannot be is named; A6 a version of NCCL without scalable init
// connects by one id
TEST(NcclConnect, TheNumberOfIds) {
  {
    const Variable none("TORCH_NCCL_RANKS_PER_ROOT", "0");
    EXPECT_HAS(text_of([] { nccl::Environment::read(); }), "TORCH_NCCL_RANKS_PER_ROOT");
  }
  EXPECT_EQ(nccl::Environment::read().ranks_per_id, 128);
  use_standin();
  const auto newest = nccl::NcclLibrary::open(NCCL_STANDIN),
             old = nccl::NcclLibrary::open(NCCL_STANDIN_2_14);
  ASSERT_TRUE(newest.ok() && old.ok());
  const auto counts = [&](int ranks, int each) {
    return std::vector<int>{nccl::ids_for(**newest, ranks, each),
                            nccl::ids_for(**old, ranks, each)};
  };
  EXPECT_EQ(counts(128, 128), (std::vector<int>{1, 1}));
  EXPECT_EQ(counts(129, 128), (std::vector<int>{2, 1}));
  EXPECT_EQ(counts(1, 1), (std::vector<int>{1, 1}));
  EXPECT_EQ(counts(3, 1), (std::vector<int>{3, 1}));
}

// NCCL's own division of ranks among ids (rootIdFromRank of its bootstrap).
TEST(NcclConnect, TheFirstRankOfEachPartMakesItsId) {
  for (int ranks = 1; ranks <= 40; ++ranks) {
    for (int ids = 1; ids <= ranks; ++ids) {
      int next = 0, begun = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const int made = nccl::id_made_by(rank, ranks, ids);
        if (made < 0) continue;
        EXPECT_EQ(made, next);
        if (next > 0) {
          EXPECT_EQ(rank - begun, ranks / ids + (next - 1 < ranks % ids ? 1 : 0));
        }
        begun = rank;
        ++next;
      }
      EXPECT_EQ(next, ids) << ranks << " ranks";
    }
  }
}

}  // namespace
}  // namespace muster::testing
