// SPDX-License-Identifier: BSD-3-Clause
#include "lab/bench/programs.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/base/process/temporary_folder.h"

namespace muster::lab {
namespace {

/// Sets a variable of this process, and restores it at the end.
class Variable {
 public:
  Variable(const char* name, const std::string& value)
      : name_(name), before_(std::getenv(name) ? std::getenv(name) : "") {
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() { before_.empty() ? ::unsetenv(name_) : ::setenv(name_, before_.c_str(), 1); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  const std::string before_;
};

class LabPrograms : public ::testing::Test {
 protected:
  /// One that does what a shell is told in `lines`.
  std::string program(const std::string& name, const std::string& lines) {
    const std::string path = folder_.path() + "/" + name;
    std::ofstream(path) << "#!/bin/sh\n" << lines;
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }

  const TemporaryFolder folder_{"muster test's "};
};

TEST_F(LabPrograms, AreTakenFromTheFolderThatIsSaid) {
  const Variable said("MUSTER_BENCH_DIR", folder_.path());
  const std::string path = program("some_worker.py", "");
  EXPECT_EQ(bench_file("some_worker.py").value(), path);
  const auto none = bench_file("no_worker.py");
  ASSERT_FALSE(none);
  EXPECT_NE(none.status().message().find("no_worker.py is not in "), std::string::npos)
      << none.status().message();
  EXPECT_NE(none.status().message().find("MUSTER_BENCH_DIR"), std::string::npos)
      << none.status().message();
}

TEST_F(LabPrograms, AProgramIsGivenItsWordsAndVariablesAsTheyAre) {
  const std::string echo = program("it's", "printf '<%s>' \"$@\" \"$MORE\"; echo complaint >&2");
  const auto said = run_program({echo, "two words", "it's", "$HOME", ""}, Complaints::shown,
                                {{"MORE", "a \"b\""}});
  ASSERT_TRUE(said) << said.status().message();
  EXPECT_EQ(*said, "<two words><it's><$HOME><><a \"b\">");
  EXPECT_EQ(run_program({echo}, Complaints::kept).value(), "<>complaint\n");
}

TEST_F(LabPrograms, AProgramThatFailsIsToldWithItsWords) {
  const auto failed =
      run_program({program("fails", "echo why; exit 3"), "argument"}, Complaints::kept);
  ASSERT_FALSE(failed);
  EXPECT_NE(failed.status().message().find("fails' argument failed: why"), std::string::npos)
      << failed.status().message();
  EXPECT_FALSE(run_program({folder_.path() + "/none"}, Complaints::kept));
}

TEST_F(LabPrograms, APythonIsTheOneThatIsSaidIfItHasTorch) {
  const std::string with = program("with", "exit 0"), without = program("without", "exit 1");
  EXPECT_EQ(find_python(with).value(), with);
  const Variable said("MUSTER_PYTHON", without);
  const auto none = find_python();
  ASSERT_FALSE(none);
  EXPECT_NE(none.status().message().find("(tried " + without + ")"), std::string::npos)
      << none.status().message();
  EXPECT_EQ(find_python(with).value(), with) << "what is asked for goes before the variable";
}

TEST_F(LabPrograms, MusterIsImportedFromWhereItIsSaidBeforeAllElse) {
  const Variable others("PYTHONPATH", "/one:/two");
  const auto variables = variables_to_import_muster("/package");
  ASSERT_EQ(variables.size(), 1u);
  EXPECT_EQ(variables[0].first, "PYTHONPATH");
  EXPECT_EQ(variables[0].second, "/package:/one:/two");
}

}  // namespace
}  // namespace muster::lab
