// SPDX-License-Identifier: BSD-3-Clause
// The commands as one tree: help, suggestions, versions.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <sstream>

#include "faces/cli/testing/launched.h"
#include "faces/cli/tree/command.h"
#include "faces/cli/tree/help.h"
#include "faces/cli/tree/suggestion.h"

namespace muster::cli::testing {
namespace {

std::size_t longest_line(const std::string& text) {
  std::istringstream lines(text);
  std::size_t most = 0;
  for (std::string line; std::getline(lines, line);) most = std::max(most, line.size());
  return most;
}

std::vector<CommandText> shown_commands() {
  std::vector<CommandText> all;
  for (const CommandRow& row : command_rows()) {
    if (row.group.empty()) continue;
    all.push_back(describe(*row.make().app));
    const auto subcommands = all.back().subcommands;
    all.insert(all.end(), subcommands.begin(), subcommands.end());
  }
  return all;
}

// spec: V4.help `muster --help` has every command once, in groups, in lines of one width
TEST(Help, ListsAllCommandsInGroups) {
  const Outcome help = run({"--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_EQ(help.out, help_of_all());
  std::size_t at = 0;
  std::string group;
  for (const CommandRow& row : command_rows()) {
    if (row.group.empty()) continue;
    if (row.group != group) at = help.out.find("\n\n" + row.group + ":\n", at);
    ASSERT_NE(at, std::string::npos) << row.group;
    at = help.out.find("\n  " + row.name + " ", at);
    ASSERT_NE(at, std::string::npos) << row.name;
    group = row.group;
  }
  EXPECT_FALSE(contains(help.out, "bench-worker")) << "no command for people";
}

// spec: V4.help the help of each command has that width, its options in groups, and --help
TEST(Help, IsOfOneWidth) {
  EXPECT_LE(longest_line(help_of_all()), kHelpColumns);
  for (const CommandText& command : shown_commands()) {
    const std::string help = help_of(command);
    EXPECT_LE(longest_line(help), kHelpColumns) << help;
    EXPECT_TRUE(help.starts_with("Usage: " + command.name + " ")) << help;
    EXPECT_TRUE(contains(help, "\n  -h, --help ")) << help;
    for (const OptionText& option : command.options)
      EXPECT_FALSE(option.text.empty()) << command.name << " " << option.names.back();
  }
  const std::string run_help = run({"run", "--help"}).out;
  for (const char* group : {"Nodes and ranks", "Failures and elastic jobs", "Output", "Program"})
    EXPECT_EQ(count_of(run_help, std::string("\n\n") + group + ":\n"), 1) << run_help;
  EXPECT_TRUE(contains(run({"checkpoint", "verify", "-h"}).out, "Usage: muster checkpoint verify"));
}

// spec: V4.suggestions a letter that is swapped, missing, wrong or too much; what is no mistyping
// of anything gets no suggestion
TEST(Suggestion, IsTheClosestName) {
  const std::vector<std::string> known = {"run", "trace", "top", "--nproc-per-node", "--nnodes"};
  for (const char* word : {"tarce", "trac", "trade", "traces"})
    EXPECT_EQ(closest_word(word, known), "trace") << word;
  EXPECT_EQ(closest_word("rnu", known), "run");
  EXPECT_EQ(closest_word("--nproc_per_nod", known), "--nproc-per-node");
  for (const char* word : {"dance", "--dance", "", "x", "-x", "mpirun"})
    EXPECT_EQ(closest_word(word, known), "") << word;
  EXPECT_EQ(closest_word(std::string(100'000, 'x'), {std::string(100'000, 'x')}), "");
}

// spec: V4.suggestions a mistyped command, subcommand or option is refused by the command that it
// was for, with what was meant
TEST(Suggestion, IsPrintedWithTheRefusal) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> mistyped = {
      {{"dcotor"}, "muster: there is no command \"dcotor\"; did you mean doctor?\n"},
      {{"--versoin"}, "muster: there is no option \"--versoin\"; did you mean --version?\n"},
      {{"checkpoint", "lss"}, "muster checkpoint: \"lss\" is not understood; did you mean ls?\n"},
      {{"trace", "--stroe=h:1"},
       "muster trace: there is no option --stroe; did you mean --store?\n"},
      {{"run", "--nporc_per-node", "2", "true"},
       "muster run: there is no option --nporc_per-node; did you mean --nproc-per-node?\n"},
      {{"launch", "--use-evn", "true"},
       "muster launch: there is no option --use-evn; did you mean --use-env?\n"}};
  for (const auto& [words, line] : mistyped) {
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 2) << line;
    EXPECT_EQ(outcome.err.substr(0, outcome.err.find('\n') + 1), line);
  }
  EXPECT_FALSE(contains(run({"dance"}).err, "did you mean"));
  EXPECT_FALSE(contains(run({"bench-worke"}).err, "bench-worker?")) << "no command for people";
}

// spec: V4.version `--version` has muster's, the commit, torch's and the compiler's
TEST(Version, NamesTorchCommitAndCompiler) {
  const Outcome version = run({"--version"});
  EXPECT_EQ(version.code, 0);
  const std::regex form(R"(muster \d+\.\d+\.\d+( \([0-9a-f]{12}(-dirty)?\))?\n)"
                        R"(torch (none|\d+\.\d+\.\d+)\ncompiler \w+ [\d.]+\n)");
  EXPECT_TRUE(std::regex_match(version.out, form)) << version.out;
}

// spec: V4.help -n and -np are mpirun's names for --nproc-per-node, and the program's after it
TEST(Run, TakesMpirunsNamesForTheWorkers) {
  for (const std::vector<std::string>& option :
       {std::vector<std::string>{"-n", "2"}, {"-np", "2"}, {"-np=2"}}) {
    std::vector<std::string> words{"run", "--standalone"};
    words.insert(words.end(), option.begin(), option.end());
    words.insert(words.end(), {"echo", "-np", "3"});
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(sorted_lines(outcome.out), (std::vector<std::string>{"[0] -np 3", "[1] -np 3"}));
  }
  const Outcome many = run({"run", "-np", "many", "true"});
  EXPECT_EQ(many.code, 2);
  EXPECT_TRUE(contains(many.err, "many")) << many.err;
}

}  // namespace
}  // namespace muster::cli::testing
