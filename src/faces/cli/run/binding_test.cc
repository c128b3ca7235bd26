// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/run/binding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/wait/topology.h"
#include "faces/cli/testing/launched.h"

namespace muster::cli::testing {
namespace {

// Two NUMA nodes of four cores of two hardware threads.
const std::string kTwoNodes = "numa:2 core:4 pu:2";

using Threads = std::vector<int>;

// spec: V5.bind core: each worker has cores of its own, next to each other
TEST(Binding, CoresAreDivided) {
  if (MUSTER_HWLOC == 0) GTEST_SKIP() << "built without hwloc (tools/setup installs it)";
  const auto bound = bind_workers("core", 3, kTwoNodes);
  ASSERT_TRUE(bound.ok()) << bound.status().message();
  ASSERT_EQ(bound->size(), 3u);
  EXPECT_EQ((*bound)[0].threads, (Threads{0, 1, 2, 3}));
  EXPECT_EQ((*bound)[1].threads, (Threads{4, 5, 6, 7, 8, 9}));
  EXPECT_EQ((*bound)[2].threads, (Threads{10, 11, 12, 13, 14, 15}));
  EXPECT_EQ((*bound)[0].cores, 2);
  EXPECT_EQ((*bound)[2].cores, 3);
  const auto many = bind_workers("core", 9, kTwoNodes);
  ASSERT_FALSE(many.ok());
  EXPECT_TRUE(contains(many.status().message(), "9 workers, and only 8 cores"))
      << many.status().message();
}

// spec: V5.bind numa: a worker has all cores of a node, and its share of them as threads
TEST(Binding, NodesAreShared) {
  if (MUSTER_HWLOC == 0) GTEST_SKIP() << "built without hwloc (tools/setup installs it)";
  const auto bound = bind_workers("numa", 4, kTwoNodes);
  ASSERT_TRUE(bound.ok()) << bound.status().message();
  ASSERT_EQ(bound->size(), 4u);
  EXPECT_EQ((*bound)[0].threads, (Threads{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ((*bound)[1].threads, (*bound)[0].threads);
  EXPECT_EQ((*bound)[3].threads, (Threads{8, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ((*bound)[0].cores, 2);
  EXPECT_EQ(bind_workers("numa", 100, kTwoNodes)->back().cores, 1);
  EXPECT_EQ(bind_workers("numa", 1, kTwoNodes)->front().cores, 4);
}

// spec: V5.bind none binds nothing, and other words are refused
TEST(Binding, NoneBindsNothing) {
  EXPECT_TRUE(bind_workers("none", 4, kTwoNodes)->empty());
  const Outcome wrong = run(run_words(1, {"--bind-to", "socket", "true"}));
  EXPECT_EQ(wrong.code, 2);
  EXPECT_TRUE(contains(wrong.err, "--bind-to")) << wrong.err;
  const Outcome spare =
      run(run_words(1, {"--elastic", "keep", "--spares", "1", "--bind-to", "core", "true"}));
  EXPECT_EQ(spare.code, 2);
  EXPECT_TRUE(contains(spare.err, "--bind-to and --spares")) << spare.err;
}

/// The words that `muster run` prints for its workers: {OMP_NUM_THREADS, the kernel's list}.
std::set<std::string> bound_lines(int workers, const std::vector<std::string>& options,
                                  const Launched::Variables& variables = {}) {
  std::vector<std::string> words = run_words(workers, options);
  words.insert(words.end(), {"--log-line-prefix-template", " ", "sh", "-c",
                             "echo $OMP_NUM_THREADS $(grep Cpus_allowed_list: /proc/$$/status)"});
  const Outcome outcome = run(words, variables);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  std::set<std::string> lines;
  std::istringstream text(outcome.out);
  for (std::string line; std::getline(text, line);) lines.insert(line.substr(1));
  return lines;
}

// spec: V5.bind workers run where they are bound, and OMP_NUM_THREADS is the number of their cores
TEST(Binding, WorkersRunThere) {
  if (MUSTER_HWLOC == 0) GTEST_SKIP() << "built without hwloc (tools/setup installs it)";
  const int workers = std::min(2, static_cast<int>(own_cores().size()));
  const auto bound = bind_workers("core", workers);
  ASSERT_TRUE(bound.ok()) << bound.status().message();
  const auto lines = bound_lines(workers, {"--bind-to", "core"});
  EXPECT_EQ(lines.size(), static_cast<std::size_t>(workers)) << "each has its own";
  std::size_t cores = 0;
  for (const auto& worker : *bound) {
    cores += static_cast<std::size_t>(worker.cores);
    const std::string begin = std::to_string(worker.cores) +
                              " Cpus_allowed_list: " + std::to_string(worker.threads.front());
    EXPECT_TRUE(std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
      return line.starts_with(begin);
    })) << begin;
  }
  EXPECT_EQ(cores, own_cores().size());
  for (const std::string& line :
       bound_lines(workers, {"--bind-to", "core"}, {{"OMP_NUM_THREADS", "7"}}))
    EXPECT_TRUE(line.starts_with("7 ")) << "the user's stays: " << line;
  EXPECT_EQ(bound_lines(2, {"--bind-to", "none"}).size(), 1u) << "both may run everywhere";
}

// spec: V5.bind --numa-binding as torchrun has it: node and exclusive; the rest is refused by name
TEST(Binding, TorchrunsWords) {
  EXPECT_EQ(*binding_of("numa", ""), "numa");
  EXPECT_EQ(*binding_of("none", "node"), "numa");
  EXPECT_EQ(*binding_of("none", "exclusive"), "core");
  for (const char* word : {"socket", "core-complex", "nodes"}) {
    const auto refused = binding_of("none", word);
    ASSERT_FALSE(refused.ok()) << word;
    EXPECT_TRUE(contains(refused.status().message(), "--numa-binding")) << word;
    EXPECT_TRUE(contains(refused.status().message(), word)) << word;
  }
  EXPECT_FALSE(binding_of("core", "node").ok()) << "one of the two";
  if (MUSTER_HWLOC == 0) return;
  EXPECT_EQ(bound_lines(1, {"--numa-binding", "exclusive"}), bound_lines(1, {"--bind-to", "core"}));
}

}  // namespace
}  // namespace muster::cli::testing
