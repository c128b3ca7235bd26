// SPDX-License-Identifier: BSD-3-Clause
// `muster run --config FILE`.
#include "faces/cli/run/run_config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "faces/cli/testing/launched.h"
#include "testing/scratch_folder.h"

namespace muster::cli::testing {
namespace {

using muster::testing::ScratchFolder;

/// A job whose ranks print how many they are, and their role.
class RunConfigTest : public ::testing::Test {
 protected:
  std::string file(const std::string& text) const {
    std::ofstream(folder_.file("job.toml")) << text;
    return folder_.file("job.toml");
  }
  Outcome run_with(const std::string& text, const std::vector<std::string>& more = {},
                   const Launched::Variables& variables = {}) const {
    std::vector<std::string> words{"run", "--config", file(text)};
    words.insert(words.end(), more.begin(), more.end());
    words.insert(words.end(), {"sh", "-c", "echo of $LOCAL_WORLD_SIZE $ROLE_NAME"});
    return run(words, variables);
  }

  const ScratchFolder folder_;
};

// spec: V5.config options of all kinds come from the file, in TOML's spelling
TEST_F(RunConfigTest, OptionsComeFromTheFile) {
  const Outcome outcome = run_with(
      "# a job\n"
      "standalone = true\n"
      "module = false\n"
      "nproc_per_node = 2       # both spellings\n"
      "role = 'two, words # and a sign'\n"
      "\"log-line-prefix-template\" = \"<\\u0024{rank}> \"\n"
      "preempt-grace = 1.5\n");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "<0> of 2 two, words # and a sign\n")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "<1> of 2 two, words # and a sign\n")) << outcome.out;
}

// spec: V5.config the command line goes before the file, and the file before PET_ variables, one of
// which may name the file
TEST_F(RunConfigTest, TheCommandLineGoesFirst) {
  const std::string text = "standalone = true\nnproc-per-node = 2\nrole = 'file'\n";
  EXPECT_EQ(run_with(text, {"-n", "1"}).out, "[0] of 1 file\n");
  EXPECT_EQ(run_with(text, {"-np", "1", "--standalone", "--role=line"}).out, "[0] of 1 line\n");
  EXPECT_EQ(run_with(text, {"-n", "1"}, {{"PET_ROLE", "variable"}}).out, "[0] of 1 file\n");
  const Outcome named =
      run({"run", "-n", "1", "sh", "-c", "echo of $ROLE_NAME"}, {{"PET_CONFIG", file(text)}});
  EXPECT_EQ(named.out, "[0] of file\n") << named.err;
}

// spec: V5.config a PET_ variable that is nearly an option's is named, one of others is not
TEST_F(RunConfigTest, AMisspeltVariableIsNamed) {
  const Outcome outcome =
      run({"run", "--standalone", "true"},
          {{"PET_NPROC_PER_NOD", "2"}, {"PET_SHOP_OPENING_HOURS", "9"}, {"PET_ROLE", "a"}});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.err,
                       "PET_NPROC_PER_NOD in the environment sets no option and is ignored; did "
                       "you mean PET_NPROC_PER_NODE?"))
      << outcome.err;
  EXPECT_FALSE(contains(outcome.err, "PET_SHOP")) << outcome.err;
  EXPECT_FALSE(contains(outcome.err, "PET_ROLE")) << outcome.err;
}

// spec: V5.config what follows the program is the program's
TEST_F(RunConfigTest, TheProgramsConfigIsItsOwn) {
  const Outcome outcome = run({"run", "--standalone", "echo", "--config", "none.toml"});
  EXPECT_EQ(outcome.out, "[0] --config none.toml\n") << outcome.err;
}

// spec: V5.config a mistake is named with its file and line, and nothing runs
TEST_F(RunConfigTest, MistakesAreNamedWithTheirLine) {
  const std::map<std::string, std::string> cases = {
      {"nproc-per-nod = 2", "line 1: there is no option --nproc-per-nod; did you mean"},
      {"\nnproc-per-node = [2, 3]", "line 2: --nproc-per-node takes one string or number"},
      {"nproc-per-node = true", "line 1: --nproc-per-node takes one string or number"},
      {"standalone = 1", "line 1: --standalone is true or false"},
      {"nproc-per-node = 1\nnproc_per_node = 2", "line 2: --nproc_per_node is there twice"},
      {"role = 'a'\nrole = 'b'", "line 2: "},
      {"role = unquoted", "line 1: "},
      {"[run]\nnproc-per-node = 2", "line 1: options stand in no section"},
      {"config = 'other.toml'", "line 1: --config is for the command line"},
      {"help = true", "line 1: --help is for the command line"}};
  for (const auto& [text, expected] : cases) {
    const Outcome outcome = run_with(text);
    EXPECT_EQ(outcome.code, 2) << text;
    EXPECT_EQ(outcome.out, "") << text;
    EXPECT_TRUE(contains(outcome.err, "muster run: --config " + file(text) + ", " + expected))
        << text << "\n"
        << outcome.err;
  }
  const Outcome missing = run({"run", "--config", "/dev/null/job.toml", "true"});
  EXPECT_EQ(missing.code, 2);
  EXPECT_TRUE(contains(
      missing.err, "--config /dev/null/job.toml: cannot read the file: not a directory (ENOTDIR)"))
      << missing.err;
  const Outcome open = run_with("role = \"open\nstandalone = true\n");
  EXPECT_EQ(open.code, 2);
  EXPECT_TRUE(contains(open.err, "is the closing quote missing?")) << open.err;
  // Values are judged as on the command line.
  const Outcome value = run_with("nproc-per-node = -1");
  EXPECT_EQ(value.code, 2);
  EXPECT_TRUE(contains(value.err, "--nproc-per-node")) << value.err;
}

}  // namespace
}  // namespace muster::cli::testing
