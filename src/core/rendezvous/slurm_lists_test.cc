#include "core/rendezvous/slurm_lists.h"

#include <gtest/gtest.h>

#include "testing/fuzz.h"

namespace muster {
namespace {

using Names = std::vector<std::string>;

// spec: R1.lists compressed node lists
TEST(SlurmLists, NodeListsAreExpanded) {
  EXPECT_EQ(expand_node_list("n1"), Names{"n1"});
  EXPECT_EQ(expand_node_list("n[1-3,7]"), (Names{"n1", "n2", "n3", "n7"}));
  EXPECT_EQ(expand_node_list("n[008-010],login"), (Names{"n008", "n009", "n010", "login"}));
  EXPECT_EQ(expand_node_list("a[1-2],b[3]"), (Names{"a1", "a2", "b3"}));
  EXPECT_EQ(expand_node_list("rack[1-2]n[1-2]"),
            (Names{"rack1n1", "rack1n2", "rack2n1", "rack2n2"}));
  EXPECT_EQ(expand_node_list("n[1-2]-ib"), (Names{"n1-ib", "n2-ib"}));
  EXPECT_EQ(expand_node_list("ip-10-0-0-1"), Names{"ip-10-0-0-1"});
  for (const char* wrong : {"", ",", "n[1-", "n[]", "n[3-1]", "n[1]]", "n[[1]]", "n[a-b]", "n]1[",
                            "n[1-9999999999]", "n[1-99999][1-99999]", "a,,b"})
    EXPECT_FALSE(expand_node_list(wrong).has_value()) << wrong;
}

// spec: R1 TASKS_PER_NODE 2(x3)
TEST(SlurmLists, TasksPerNodeAreExpanded) {
  EXPECT_EQ(expand_tasks_per_node("4"), std::vector<int>{4});
  EXPECT_EQ(expand_tasks_per_node("2(x3)"), (std::vector<int>{2, 2, 2}));
  EXPECT_EQ(expand_tasks_per_node("2(x2),1,3(x1)"), (std::vector<int>{2, 2, 1, 3}));
  for (const char* wrong : {"", "x", "2(x", "2(x)", "2(x3", "-1", "2,", "1(x9999999999)"})
    EXPECT_FALSE(expand_tasks_per_node(wrong).has_value()) << wrong;
}

TEST(SlurmListsFuzz, AnyTextIsAListOrIsNot) {
  testing::Fuzz fuzz(71);
  for (testing::FuzzRun run(5000); run.goes_on();) {
    const std::string text = fuzz.babble(24, "n[]-,019(x)");
    if (const auto names = expand_node_list(text)) {
      EXPECT_FALSE(names->empty());
      EXPECT_LE(names->size(), 1'000'000u);
    }
    static_cast<void>(expand_tasks_per_node(text));
  }
}

}  // namespace
}  // namespace muster
