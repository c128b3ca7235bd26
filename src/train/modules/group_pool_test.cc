// SPDX-License-Identifier: BSD-3-Clause
#include "train/modules/group_pool.h"

#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <string>

#include "core/group/testing/ranks.h"
#include "muster/collectives.h"

namespace muster::testing {
namespace {

using parallel::acquire_group;
using parallel::release_group;

// Models created one after another, as in a hyperparameter search, share one group.
TEST(SpareGroups, AreTakenAgain) {
  on_ranks(3, [](int) {
    std::set<std::string> names;
    for (int model = 0; model < 10; ++model) {
      const Group group = acquire_group(default_group());
      auto tensor = torch::ones({2});
      all_reduce(tensor, {.group = group});
      EXPECT_SAME(tensor, torch::full({2}, 3.0));
      names.insert(group->name());
      release_group(default_group(), group);
    }
    EXPECT_EQ(names.size(), 1U);
  });
}

// A group that one member still holds, has called more often, or has seen fail is not reused.
TEST(SpareGroups, AreOnlyThoseThatAllMembersGaveBackAlike) {
  on_ranks(2, [](int rank) {
    const Group kept = acquire_group(default_group());
    if (rank == 0) release_group(default_group(), kept);
    const Group other = acquire_group(default_group());
    EXPECT_NE(kept->name(), other->name());
    release_group(default_group(), other);
    if (rank == 1) release_group(default_group(), kept);
    const Group first = acquire_group(default_group());
    const Group second = acquire_group(default_group());
    EXPECT_EQ((std::set{first->name(), second->name()}), (std::set{kept->name(), other->name()}));

    if (rank == 0) all_reduce(torch::ones({2}), {.group = first, .async_op = true});
    release_group(default_group(), first);
    const Group third = acquire_group(default_group());
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
    const Group one = acquire_group(default_group());
    release_group(default_group(), one);
    EXPECT_NE(acquire_group(given)->name(), one->name());
  });
  on_ranks(2, [](int) {
    EXPECT_TRUE(acquire_group(default_group())->failure().ok());
  });  // the previous job's groups are gone
}

}  // namespace
}  // namespace muster::testing
