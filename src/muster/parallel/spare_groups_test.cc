#include "muster/parallel/spare_groups.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>

#include "muster/group/collectives.h"
#include "muster/group/test_ranks.h"

namespace muster::testing {
namespace {

using parallel::give_group_back;
using parallel::take_group;

// One model after another, as a search over parameters makes them: they share one group.
TEST(SpareGroups, AreTakenAgain) {
  on_ranks(3, [](int) {
    std::set<std::string> names;
    for (int model = 0; model < 10; ++model) {
      const Group group = take_group(default_group());
      auto tensor = torch::ones({2});
      all_reduce(tensor, {.group = group});
      EXPECT_SAME(tensor, torch::full({2}, 3.0));
      names.insert(group->name());
      give_group_back(default_group(), group);
    }
    EXPECT_EQ(names.size(), 1U);
  });
}

// A group that one member still has, or has called more often, or that has failed on it, is
// nobody's.
TEST(SpareGroups, AreOnlyThoseThatAllMembersGaveBackAlike) {
  on_ranks(2, [](int rank) {
    const Group kept = take_group(default_group());
    if (rank == 0) give_group_back(default_group(), kept);
    const Group other = take_group(default_group());
    EXPECT_NE(kept->name(), other->name());
    give_group_back(default_group(), other);
    if (rank == 1) give_group_back(default_group(), kept);
    const Group first = take_group(default_group());
    const Group second = take_group(default_group());
    EXPECT_EQ((std::set{first->name(), second->name()}), (std::set{kept->name(), other->name()}));

    if (rank == 0) all_reduce(torch::ones({2}), {.group = first, .async_op = true});
    give_group_back(default_group(), first);
    const Group third = take_group(default_group());
    EXPECT_EQ((std::set{first->name(), second->name()}).count(third->name()), 0U);
    auto tensor = torch::ones({2});
    all_reduce(tensor, {.group = third});
    EXPECT_SAME(tensor, torch::full({2}, 2.0));
    if (rank == 1) all_reduce(torch::ones({2}), {.group = first, .async_op = true});
  });
}

TEST(SpareGroups, OfOneGroupAreNotAnothers) {
  on_ranks(2, [](int) {
    const Group given = new_group();
    const Group one = take_group(default_group());
    give_group_back(default_group(), one);
    EXPECT_NE(take_group(given)->name(), one->name());
  });
  on_ranks(2, [](int) {
    EXPECT_TRUE(take_group(default_group())->failure().ok());
  });  // those of the job before are gone
}

}  // namespace
}  // namespace muster::testing
