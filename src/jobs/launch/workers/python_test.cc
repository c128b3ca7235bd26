#include "jobs/launch/workers/python.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/base/process/temporary_folder.h"

namespace muster::launch {
namespace {

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
  EXPECT_EQ(explained("No module named 'muster'").find("PYTHONPATH"), std::string::npos);
  fs::create_directories(path("build/python/muster"));
  EXPECT_NE(explained("No module named 'muster'").find("PYTHONPATH=" + path("build/python")),
            std::string::npos);
  EXPECT_EQ(explained("ValueError: bad batch"), "");
  EXPECT_EQ(explained("No module named 'torchvision'"), "") << "another module's name";
  EXPECT_NE(explained("No module named 'torch.distributed'"), "");
}

}  // namespace
}  // namespace muster::launch
