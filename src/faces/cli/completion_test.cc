// SPDX-License-Identifier: BSD-3-Clause
// `muster completion` and `muster man-pages`: what shells and man(1) make of the commands' options.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "faces/cli/testing/launched.h"
#include "faces/cli/tree/command.h"
#include "faces/cli/tree/command_text.h"
#include "testing/scratch_folder.h"
#include "testing/shell.h"

namespace muster::cli::testing {
namespace {

/// The completions that bash has for the last of `words`, each followed by a space.
class Bash {
 public:
  Bash() {
    std::ofstream(folder_.file("muster.bash")) << run({"completion", "bash"}).out;
    std::ofstream(folder_.file("ask")) << "source " + folder_.file("muster.bash") +
                                              "\nCOMP_WORDS=(\"$@\")\nCOMP_CWORD=$(($# - 1))\n"
                                              "_muster\nprintf '%s ' \"${COMPREPLY[@]}\"\n";
  }
  std::string complete(const std::string& words) const {
    const auto ended = muster::testing::run_shell("bash " + folder_.file("ask") + " " + words);
    EXPECT_EQ(ended.code, 0) << words << "\n" << ended.output;
    return ended.output;
  }

 private:
  const muster::testing::ScratchFolder folder_;
};

// spec: V4.completion bash completes commands, subcommands, options and values
TEST(Completion, OfBash) {
  const Bash bash;
  EXPECT_EQ(bash.complete("muster ch"), "checkpoint ");
  EXPECT_EQ(bash.complete("muster checkpoint v"), "verify ");
  EXPECT_EQ(bash.complete("muster checkpoint convert --p"), "--prefix ");
  EXPECT_EQ(bash.complete("muster run --nno"), "--nnodes --nnode ");
  EXPECT_EQ(bash.complete("muster run -n 2 --node-rank 0 --st"), "--standalone --start-method ");
  EXPECT_EQ(bash.complete("muster bench --transport ''"), "shm tcp ");
  EXPECT_EQ(bash.complete("muster bench --dtype = bf"), "bfloat16 ");
  EXPECT_EQ(bash.complete("muster completion z"), "zsh ");
  EXPECT_EQ(bash.complete("muster run --elastic ''"), "restart keep ");
  EXPECT_EQ(bash.complete("muster run --rdzv-backend c"), "c10d ");
  EXPECT_EQ(bash.complete("muster run --bind-to n"), "none numa ");
  EXPECT_EQ(bash.complete("muster run -n 2 --log-format j"), "json ");
  EXPECT_EQ(bash.complete("muster bench-w"), " ") << "no command for people";
}

// spec: V4.completion what follows the program of `muster run` is completed as files, and so is the
// value of an option that has no list of values
TEST(Completion, LeavesTheProgramsWordsToIt) {
  const Bash bash;
  EXPECT_EQ(bash.complete("muster run ./train --nno"), " ");
  EXPECT_EQ(bash.complete("muster run -n 2 ./train --nno"), " ");
  EXPECT_EQ(bash.complete("muster run -n = 2 ./train --nno"), " ");
  EXPECT_EQ(bash.complete("muster run --standalone ./train --nno"), " ");
  EXPECT_EQ(bash.complete("muster run -- --nno"), " ");
  EXPECT_EQ(bash.complete("muster trace --dir ''"), " ");
}

// spec: V4.completion the scripts for zsh and fish have each command and option; the shells read
// them, if they are installed
TEST(Completion, OfZshAndFish) {
  const muster::testing::ScratchFolder folder;
  for (const char* shell : {"zsh", "fish"}) {
    const std::string script = run({"completion", shell}).out;
    for (const CommandRow& row : command_rows()) {
      if (row.group.empty()) continue;
      for (const OptionText& option : describe(*row.make().app).options)
        EXPECT_TRUE(contains(script, option.names.back().substr(2))) << row.name;
    }
    std::ofstream(folder.file(shell)) << script;
    const std::string check = std::string(shell) == "zsh" ? "zsh -n " : "fish --no-execute ";
    const auto read = muster::testing::run_shell("(! command -v " + std::string(shell) + " || " +
                                                 check + folder.file(shell) + ")");
    EXPECT_EQ(read.code, 0) << read.output;
  }
  EXPECT_EQ(run({"completion", "tcsh"}).code, 2);
}

// Fish too leaves what follows the program of `muster run` to it
TEST(Completion, OfFishLeavesTheProgramsWordsToIt) {
  if (muster::testing::run_shell("command -v fish").code != 0)
    GTEST_SKIP() << "fish is not installed";
  const muster::testing::ScratchFolder folder;
  std::ofstream(folder.file("muster.fish")) << run({"completion", "fish"}).out;
  const auto complete = [&](const std::string& words) {
    const auto ended =
        muster::testing::run_shell("HOME=" + folder.path() + " fish -c 'source " +
                                   folder.file("muster.fish") + "; complete -C \"" + words + "\"'");
    EXPECT_EQ(ended.code, 0) << words << "\n" << ended.output;
    return ended.output;
  };
  for (const char* before : {"", "-n 2 ", "--standalone ", "--nnodes=1 -n 2 "}) {
    const std::string words = std::string("muster run ") + before;
    EXPECT_TRUE(contains(complete(words + "--nno"), "--nnodes")) << words;
    EXPECT_FALSE(contains(complete(words + "./train --nno"), "--nnodes")) << words;
  }
  EXPECT_FALSE(contains(complete("muster run -- --nno"), "--nnodes"));
  EXPECT_TRUE(contains(complete("muster bench --transport "), "shm"));
}

// spec: V4.man a page for each command, in which man finds no fault, with its options
TEST(ManPages, AreThereForEachCommand) {
  const muster::testing::ScratchFolder folder;
  const std::string man1 = folder.file("man/man1");
  const Outcome written = run({"man-pages", man1});
  EXPECT_EQ(written.code, 0) << written.err;
  const bool formatted = muster::testing::run_shell("command -v groff").code == 0;
  const std::string all = contents(man1 + "/muster.1");
  for (const CommandRow& row : command_rows()) {
    if (row.group.empty()) continue;
    EXPECT_TRUE(contains(all, "muster\\-" + row.name)) << all;
    const std::string page = man1 + "/muster-" + row.name + ".1";
    EXPECT_TRUE(contains(contents(page), ".SH SYNOPSIS\n\\fBmuster " + row.name)) << page;
    if (!formatted) continue;
    const auto shown = muster::testing::run_shell("groff -man -ww -Tascii -P-c -P-b " + page);
    EXPECT_EQ(shown.code, 0) << shown.output;
    EXPECT_FALSE(contains(shown.output, "warning")) << shown.output;
    EXPECT_TRUE(contains(shown.output, row.name)) << shown.output;
    for (const OptionText& option : describe(*row.make().app).options)
      EXPECT_TRUE(contains(shown.output, option.names.back())) << shown.output;
  }
  EXPECT_EQ(run({"man-pages", "/dev/null/man1"}).code, 1);
}

}  // namespace
}  // namespace muster::cli::testing
