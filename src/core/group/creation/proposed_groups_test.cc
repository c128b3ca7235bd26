// SPDX-License-Identifier: BSD-3-Clause
// Groups created by all ranks, whose first member's proposal travels in the round that compares the
// calls.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>

#include "core/collective/region_group.h"
#include "core/group/errors.h"
#include "core/group/job.h"
#include "core/group/testing/ranks.h"
#include "core/group/world.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;

using Members = std::vector<int>;

int sum_in(const Group& group, int mine) {
  auto tensor = torch::full({1}, mine, at::kInt);
  all_reduce(tensor, {.group = group});
  return tensor.item<int>();
}

// spec: D1 a new group takes one round of the default group: no other waits, and no thread is
// started
TEST(OfferedGroups, AreMadeWithoutAnotherThread) {
  on_ranks(3, [](int rank) {
    const auto threads = [] {
      barrier();
      const std::filesystem::directory_iterator tasks("/proc/self/task");
      const auto count = std::distance(begin(tasks), end(tasks));
      barrier();
      return count;
    };
    const auto before = threads();
    const auto group = new_group({.ranks = Members{1, 2}});
    EXPECT_EQ(threads(), before);
    EXPECT_EQ(sum_in(group, rank), rank == 0 ? 0 : 3);
  });
}

// spec: D1 a mismatch is an error naming both calls, and leaves nothing behind: first members'
// proposals are cancelled
TEST(OfferedGroups, OfDifferentCallsAreTakenBack) {
  on_ranks(3, [](int rank) {
    auto* const region = World::current().job("test")->fabric->region();
    ASSERT_NE(region, nullptr);
    const auto room = [&] {  // the region slots the next two groups of that size would use
      barrier();
      std::vector<std::uint64_t> found;
      for (int i = 0; i < 2 && rank == 0; ++i)
        found.push_back(group::take(region->claim(collective::RegionGroup::segment_bytes(2))));
      for (const auto segment : found) region->release(segment);
      barrier();
      std::ranges::sort(found);
      return found;
    };
    const auto before = room();
    for (int i = 0; i < 20; ++i) {
      // Two groups whose first members both propose; and one group with another backend.
      const auto said = message_of<DistError>([&] {
        new_group({.ranks = rank == 0 ? Members{0, 2} : Members{1, 2},
                   .backend = rank == 2 ? "tcp" : "native"});
      });
      EXPECT_HAS(said, "rank 0 called new_group(ranks=[0, 2], backend=native");
      EXPECT_HAS(said, "rank 1 called new_group(ranks=[1, 2], backend=native");
    }
    EXPECT_EQ(room(), before);
    EXPECT_EQ(sum_in(new_group({.ranks = Members{0, 2}}), 1 << rank), rank == 1 ? 2 : 5);
  });
}

// spec: D1 groups whose first member proposes nothing are agreed on by their members: tuned ones,
// those of one rank, several backends
TEST(OfferedGroups, WithoutAnOffer) {
  ::setenv("MUSTER_ALGORITHM", "all_reduce:shares", 1);
  on_ranks(4, [](int rank) {
    for (int i = 0; i < 5; ++i)
      EXPECT_EQ(sum_in(new_group({.ranks = Members{1, 2, 3}}), 1 << rank), rank == 0 ? 1 : 14);
  });
  ::unsetenv("MUSTER_ALGORITHM");
  on_ranks(4, [](int rank) {
    const auto alone = new_group({.ranks = Members{2}});
    EXPECT_EQ(alone->is_member(), rank == 2);
    EXPECT_EQ(sum_in(alone, 7), 7);
    const auto both = new_group({.ranks = Members{1, 3}, .backend = "cpu:native,cuda:gloo"});
    EXPECT_EQ(sum_in(both, 1 << rank), rank % 2 == 0 ? 1 << rank : 10);
  });
}

}  // namespace
}  // namespace muster
