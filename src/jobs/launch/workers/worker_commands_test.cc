// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/base/process/temporary_folder.h"
#include "jobs/launch/workers/worker_commands.h"

namespace muster::launch {
namespace {

std::vector<NodeFacts> three_nodes() {
  return {{2, "trainer", "a", 0}, {1, "reader", "b", 0}, {3, "trainer", "c", 0}};
}

// spec: J5 RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, ROLE_RANK and
// ROLE_WORLD_SIZE over nodes of different sizes and roles
TEST(AssignRanks, NodesOfDifferentSizesAndRoles) {
  const auto nodes = three_nodes();
  const auto last = assign_ranks(nodes, 2);
  ASSERT_EQ(last.size(), 3u);
  EXPECT_EQ(last[1], (WorkerRanks{.rank = 4,
                                  .world_size = 6,
                                  .local_rank = 1,
                                  .local_world_size = 3,
                                  .group_rank = 2,
                                  .group_world_size = 3,
                                  .role_rank = 3,
                                  .role_world_size = 5}));
  const auto middle = assign_ranks(nodes, 1);
  ASSERT_EQ(middle.size(), 1u);
  EXPECT_EQ(middle[0].rank, 2);
  EXPECT_EQ(middle[0].role_rank, 0);
  EXPECT_EQ(middle[0].role_world_size, 1);
}

// spec: J5 every rank of the job is given once, in the order of the nodes
TEST(AssignRanks, EveryRankOnce) {
  const auto nodes = three_nodes();
  int next = 0;
  for (int node = 0; node < 3; ++node) {
    for (const WorkerRanks& worker : assign_ranks(nodes, node)) {
      EXPECT_EQ(worker.rank, next);
      EXPECT_EQ(node_of_rank(nodes, next), node);
      ++next;
    }
  }
  EXPECT_EQ(next, 6);
  EXPECT_EQ(node_of_rank(nodes, 6), -1);
  EXPECT_EQ(node_of_rank(nodes, -1), -1);
}

// spec: J3 nodes describe themselves to each other; nonsense is refused
TEST(NodeFacts, TravelAsBytes) {
  const auto back = decode_node_facts(encode({5, "reader", "host.example", 2}));
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->workers, 5);
  EXPECT_EQ(back->role, "reader");
  EXPECT_EQ(back->host, "host.example");
  EXPECT_EQ(back->max_restarts, 2);
  const std::string record = encode({5, "reader", "host.example", 2});
  for (std::size_t cut = 0; cut < record.size(); ++cut)
    EXPECT_FALSE(decode_node_facts(record.substr(0, cut)).ok());
  EXPECT_FALSE(decode_node_facts(encode({0, "", "", 0})).ok());
}

// spec: J5 the names and values that workers see
TEST(WorkerEnvironment, SaysEverything) {
  const JobEnvironment job{.master_addr = "host.example",
                           .master_port = 1234,
                           .run_id = "job7",
                           .role = "trainer",
                           .max_restarts = 3,
                           .agent_store = "host.example:1233",
                           .python = "/usr/bin/python3",
                           .secret_place = "77:5",
                           .threads = 2};
  const auto result = worker_environment({{"HOME", "/h"},
                                          {"RANK", "99"},
                                          {"MUSTER_SECRET", "words of the user's"},
                                          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                          {"MUSTER_AGENT_STORE", "[::1]:9"}},
                                         job, assign_ranks(three_nodes(), 2)[0], 1);
  const Environment expected = {{"HOME", "/h"},
                                {"RANK", "3"},
                                {"WORLD_SIZE", "6"},
                                {"LOCAL_RANK", "0"},
                                {"LOCAL_WORLD_SIZE", "3"},
                                {"GROUP_RANK", "2"},
                                {"GROUP_WORLD_SIZE", "3"},
                                {"GROUP_WORLD_SIZE", "3"},
                                {"ROLE_RANK", "2"},
                                {"ROLE_WORLD_SIZE", "5"},
                                {"ROLE_NAME", "trainer"},
                                {"MASTER_ADDR", "host.example"},
                                {"MASTER_PORT", "1234"},
                                {"TORCHELASTIC_RESTART_COUNT", "1"},
                                {"TORCHELASTIC_MAX_RESTARTS", "3"},
                                {"TORCHELASTIC_RUN_ID", "job7"},
                                {"PYTHON_EXEC", "/usr/bin/python3"},
                                {"MUSTER_AGENT_STORE", "host.example:1233"},
                                {"MUSTER_SECRET_FD", "77:5"},
                                {"OMP_NUM_THREADS", "2"}};
  EXPECT_EQ(result, expected);
}

// spec: S8 epochs come with the launch that they belong to, never with that of an outer launcher
TEST(WorkerEnvironment, TellsTheLaunch) {
  const Environment outer{{"MUSTER_EPOCH", "4"}, {"MUSTER_LAUNCH", "outer"}};
  JobEnvironment job;
  EXPECT_FALSE(worker_environment(outer, job, {}, 0).contains("MUSTER_LAUNCH"));
  job.epoch = 1;
  job.launch = "own";
  EXPECT_EQ(worker_environment(outer, job, {}, 0).at("MUSTER_LAUNCH"), "own");
}

// spec: J5 what the user has set for threads stays
TEST(WorkerEnvironment, LeavesTheUsersThreads) {
  JobEnvironment job;
  job.threads = 2;
  const auto result = worker_environment({{"OMP_NUM_THREADS", "8"}}, job, {}, 0);
  EXPECT_EQ(result.at("OMP_NUM_THREADS"), "8");
  EXPECT_FALSE(result.contains("MUSTER_SECRET_FD"));
}

namespace fs = std::filesystem;

/// A folder with source trees and virtual environments whose Pythons are empty files.
class PythonPlaces : public ::testing::Test {
 protected:
  std::string environment(const std::string& name) const {
    const fs::path folder = root() / name;
    fs::create_directories(folder / "bin");
    std::ofstream(folder / "pyvenv.cfg") << "home = /usr/bin\n";
    return executable(name + "/bin/python3");
  }
  std::string executable(const std::string& name) const {
    const fs::path path = root() / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << "#!/bin/sh\n";
    fs::permissions(path, fs::perms::owner_all);
    return path.string();
  }
  std::string path(const std::string& name) const { return (root() / name).string(); }
  fs::path root() const { return folder_.path(); }
  std::string first(const Environment& variables,
                    const std::string& command = "nowhere/bin/muster") const {
    const auto found = first_python(python_places(variables, path(command)));
    return found ? *found : "";
  }

 private:
  const TemporaryFolder folder_{"muster-test-"};
};

// spec: J3 what runs a file that ends in .py: what is said, then the environments around, then PATH
TEST_F(PythonPlaces, TheirOrder) {
  const std::string built = "tree/build/release/bin/muster", installed = "installed/bin/muster";
  executable("tree/tools/setup");
  const std::string of_tree = environment("tree/.venv"), beside = environment("installed"),
                    active = environment("active");
  const Environment activated = {{"VIRTUAL_ENV", path("active")}};
  EXPECT_EQ(first({}, built), of_tree);
  EXPECT_EQ(first({}, installed), beside);
  EXPECT_EQ(first(activated, built), active) << "an activated environment goes before the tree's";
  EXPECT_EQ(first(activated, installed), beside)
      << "and behind the one that the command is installed in";
  EXPECT_EQ(first({{"MUSTER_PYTHON", "/opt/python"}, {"VIRTUAL_ENV", path("active")}}, installed),
            "/opt/python");
  EXPECT_EQ(first({{"MUSTER_PYTHON", "/opt/python"}, {"PYTHON_EXEC", "/opt/other"}}, installed),
            "/opt/other");
  EXPECT_EQ(first({{"VIRTUAL_ENV", path("removed")}}, built), of_tree)
      << "an environment that has gone is none";
  const std::string of_conda = executable("conda/bin/python3");
  const Environment conda = {{"CONDA_PREFIX", path("conda")}, {"CONDA_DEFAULT_ENV", "train"}};
  EXPECT_EQ(first(conda, built), of_conda);
  EXPECT_EQ(first({{"CONDA_PREFIX", path("conda")}, {"CONDA_DEFAULT_ENV", "base"}}, built), of_tree)
      << "conda activates that one by itself";
}

TEST_F(PythonPlaces, AnEnvironmentThatIsNotOfAMusterTreeIsLeftAlone) {
  environment("home/.venv");
  EXPECT_NE(first({}, "home/build/release/bin/muster"), path("home/.venv/bin/python3"));
}

// spec: W3 a Python that another user can have laid is not found: an environment two folders above
// the command, or around it, in a place where others may write
TEST_F(PythonPlaces, WhatOthersCanHaveLaidIsNotFound) {
  const std::string command = "scratch/alice/muster/bin/muster";
  executable("scratch/tools/setup");
  const std::string of_tree = environment("scratch/.venv"),
                    beside = environment("scratch/alice/muster");
  EXPECT_EQ(first({}, command), beside);
  const auto open_to_others = [&](const std::string& folder) {
    fs::permissions(path(folder), fs::perms::others_write, fs::perm_options::add);
  };
  open_to_others("scratch/alice/muster/bin");
  EXPECT_EQ(first({}, command), of_tree);
  open_to_others("scratch/.venv");
  const std::string python = first({}, command);
  EXPECT_NE(python, of_tree);
  EXPECT_NE(python, beside);
  open_to_others("scratch");
  EXPECT_EQ(first({{"MUSTER_PYTHON", beside}}, command), beside) << "what is named is taken";
}

TEST_F(PythonPlaces, WithoutAnyTheErrorTellsWhereItWasLookedFor) {
  const auto none = first_python({{"MUSTER_PYTHON", ""}, {"python3 on PATH", ""}});
  ASSERT_FALSE(none);
  EXPECT_NE(none.status().message().find("MUSTER_PYTHON (none), python3 on PATH (none)"),
            std::string::npos)
      << none.status().message();
}

TEST_F(PythonPlaces, AMissingModuleIsExplained) {
  const auto places = python_places({{"MUSTER_PYTHON", "/opt/python"}}, path("build/bin/muster"));
  const auto explained = [&](const std::string& words) {
    return explain_missing_module(words, places, path("build/bin/muster"));
  };
  const std::string torch = explained("ModuleNotFoundError: No module named 'torch'\n");
  for (const char* part : {"/opt/python ran the program", "PYTHON_EXEC (none)",
                           "VIRTUAL_ENV (none)", "which Python has torch"})
    EXPECT_NE(torch.find(part), std::string::npos) << part << " in " << torch;
  const std::string muster = explained("No module named 'muster'");
  EXPECT_NE(muster.find("pip install its wheel"), std::string::npos) << muster;
  EXPECT_EQ(muster.find("PYTHONPATH"), std::string::npos);
  fs::create_directories(path("build/python/muster"));
  EXPECT_NE(explained("No module named 'muster'").find("PYTHONPATH=" + path("build/python")),
            std::string::npos);
  EXPECT_EQ(explained("ValueError: bad batch"), "");
  EXPECT_EQ(explained("No module named 'torchvision'"), "") << "another module's name";
  EXPECT_NE(explained("No module named 'torch.distributed'"), "");
}

}  // namespace

}  // namespace muster::launch
