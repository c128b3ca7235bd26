// SPDX-License-Identifier: BSD-3-Clause
// `muster run --print-join` and `--join`: nodes that come by one line.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "faces/cli/run/run_join.h"
#include "faces/cli/testing/launched.h"
#include "testing/reserved_port.h"
#include "testing/scratch_folder.h"

namespace muster::cli::testing {
namespace {

using Lines = std::vector<std::string>;

/// The first node of a job; its program's last word is "last-word".
std::vector<std::string> first_words(const std::string& nodes, const std::string& script,
                                     std::vector<std::string> options = {"--print-join"}) {
  std::vector<std::string> words = {"run", "--nnodes", nodes, "--local-addr", "127.0.0.1"};
  words.insert(words.end(), options.begin(), options.end());
  words.insert(words.end(), {"sh", "-c", script, "last-word"});
  return words;
}

std::vector<std::string> join_words(const std::string& token, const std::string& script,
                                    std::vector<std::string> options = {}) {
  std::vector<std::string> words = {"run", "--join", token};
  words.insert(words.end(), options.begin(), options.end());
  words.insert(words.end(), {"sh", "-c", script, "last-word"});
  return words;
}

std::string token_in(const std::string& text) {
  const std::size_t at = text.find("--join ");
  if (at == std::string::npos) return {};
  const std::size_t from = at + 7;
  return text.substr(from, text.find(' ', from) - from);
}

/// Waits for the line that a first node prints.
std::string line_of(Launched& first) {
  if (!first.wait_for_error("last-word\n")) return {};
  return first.take_error();
}

const std::string kMeet = "exec " + kWorker + " meet";

// spec: V5.join the first node prints one line; typed elsewhere it makes that a node of the job,
// with the job's secret and without another word
TEST(Join, OneLineMakesANode) {
  Launched first(
      first_words("2", kMeet, {"--print-join", "--log-line-prefix-template", "<${rank}> "}));
  const std::string text = line_of(first), token = token_in(text);
  ASSERT_FALSE(token.empty()) << text;
  EXPECT_EQ(text, "muster run: on 1 other node type:\n  muster run --join " + token +
                      " '--log-line-prefix-template=<${rank}> ' sh -c '" + kMeet + "' last-word\n");
  EXPECT_TRUE(token.starts_with("127.0.0.1:")) << token;
  const Outcome second = run(join_words(token, kMeet));
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(second.out, "[1] met 01\n") << "without the option";
  const Outcome outcome = first.finish();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "met 01")) << outcome.out;
  EXPECT_FALSE(contains(outcome.err, token)) << "it is printed once";
}

// spec: V5.join what a file of options says is in the line, and the file is needed nowhere else
TEST(Join, TheLineHasTheOptionsOfAFile) {
  const muster::testing::ScratchFolder folder;
  const std::string file = folder.file("job.toml");
  std::ofstream(file) << "nnodes = 2\nprint-join = true\nrole = 'trainer'\n";
  Launched first(
      {"run", "--config", file, "--local-addr", "127.0.0.1", "sh", "-c", kMeet, "last-word"});
  const std::string text = line_of(first), token = token_in(text);
  EXPECT_EQ(text, "muster run: on 1 other node type:\n  muster run --join " + token +
                      " --role=trainer sh -c '" + kMeet + "' last-word\n");
  first.signal(SIGTERM);
  EXPECT_EQ(first.finish().code, 128 + SIGTERM);
}

// spec: V5.join a line that cannot be written is an error at once, and no wait for nodes
TEST(Join, TheLineCannotBeWritten) {
  Launched first(first_words("2", "true"), {}, [] {
    const int full = ::open("/dev/full", O_WRONLY);
    if (full < 0 || ::dup2(full, 2) < 0) ::_exit(99);
  });
  EXPECT_EQ(first.finish().code, 1);
}

// spec: V5.join a token from standard input; what follows it there is for the program
TEST(Join, TheTokenFromStandardInput) {
  const std::string script = "test $RANK = 0 || { read -r line; echo \"$line\"; }; " + kMeet;
  Launched first(first_words("2", script));
  const std::string text = token_in(line_of(first)) + "\nfor the program\n";
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Descriptor out(ends[0]);
  Descriptor in(ends[1]);
  ASSERT_EQ(::write(in.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  in.reset();
  Launched second(join_words("-", script), {}, [&] { ::dup2(out.get(), 0); });
  const Outcome outcome = second.finish();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "[1] for the program\n[1] met 01\n");
  EXPECT_EQ(first.finish().code, 0);
}

// spec: V5.join where nobody has asked for it, the token is printed to a terminal only
TEST(Join, TheTokenGoesToATerminalOnly) {
  const Outcome refused = run(first_words("2", "true", {}));
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "--print-join")) << refused.err;
  EXPECT_FALSE(contains(refused.err, "--join 127")) << refused.err;

  const Descriptor terminal(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal && ::grantpt(terminal.get()) == 0 && ::unlockpt(terminal.get()) == 0);
  const std::string name = ::ptsname(terminal.get());
  Launched first(first_words("2", "true", {}), {}, [&] {
    const int screen = ::open(name.c_str(), O_RDWR | O_NOCTTY);
    if (screen < 0 || ::dup2(screen, 2) < 0) ::_exit(99);
  });
  std::string text;
  char piece[4096];
  while (!contains(text, "last-word")) {
    const ssize_t got = ::read(terminal.get(), piece, sizeof piece);
    ASSERT_GT(got, 0) << text;
    text.append(piece, static_cast<std::size_t>(got));
  }
  EXPECT_TRUE(contains(text, "--join 127.0.0.1:")) << text;
  first.signal(SIGTERM);
  EXPECT_EQ(first.finish().code, 128 + SIGTERM);
}

// spec: V5.join a secret that a user has given stays with the user: the token does not lead to it
TEST(Join, AGivenSecretIsNotHandedOut) {
  const Launched::Variables secret = {{"MUSTER_SECRET", "a given secret for the tests"}};
  Launched first(first_words("2", kMeet), secret);
  const std::string text = line_of(first), token = token_in(text);
  EXPECT_TRUE(contains(text, "with the same secret as here")) << text;
  const Outcome without = run(join_words(token, kMeet));
  EXPECT_EQ(without.code, 1);
  EXPECT_TRUE(contains(without.err, "MUSTER_SECRET")) << without.err;
  EXPECT_EQ(run(join_words(token, kMeet), secret).code, 0);
  EXPECT_EQ(first.finish().code, 0);
}

// spec: V5.join a node that has been given a secret takes no other one from a process that answers
// a token
TEST(Join, AGivenSecretIsNotReplaced) {
  Launched first(first_words("2", "true"));
  const std::string token = token_in(line_of(first));
  const Outcome refused =
      run(join_words(token, "echo came"), {{"MUSTER_SECRET", "a given secret for the tests"}});
  EXPECT_EQ(refused.code, 1);
  EXPECT_EQ(refused.out, "");
  EXPECT_TRUE(contains(refused.err, "MUSTER_SECRET")) << refused.err;
  first.signal(SIGTERM);
  EXPECT_EQ(first.finish().code, 128 + SIGTERM);
}

// spec: V5.join once all nodes have come the token is worth nothing
TEST(Join, TheTokenEndsWithTheLastNode) {
  const std::string script = "exec " + kWorker + " wait 0";
  Launched first(first_words("2", script));
  const std::string token = token_in(line_of(first));
  Launched second(join_words(token, script));
  ASSERT_TRUE(first.wait_for_output("ready"));
  ASSERT_TRUE(second.wait_for_output("ready"));
  const Outcome late = run(join_words(token, script, {"--join-timeout", "1"}));
  EXPECT_EQ(late.code, 1);
  EXPECT_TRUE(contains(late.err, "opens nothing once all of its nodes have come")) << late.err;
  first.signal(SIGTERM);
  EXPECT_EQ(first.finish().code, 128 + SIGTERM);
  EXPECT_EQ(second.finish().code, 128 + SIGTERM);
}

// spec: V5.join the token of a job that takes nodes later opens it for as long as it lasts
TEST(Join, AnElasticJobTakesNodesWhileItRuns) {
  const Lines conf = {"--rdzv-conf", "last_call_timeout=0", "--max-restarts", "9"};
  const std::string script = "echo is $RANK of $WORLD_SIZE; exec " + kWorker + " wait 0";
  Lines options = conf;
  options.push_back("--print-join");
  Launched first(first_words("1:2", script, options));
  const std::string text = line_of(first), token = token_in(text);
  EXPECT_TRUE(contains(text, "on up to 1 other node type:")) << text;
  ASSERT_TRUE(first.wait_for_output("is 0 of 1"));
  for (int time = 0; time < 2; ++time) {
    Launched second(join_words(token, script, conf));
    ASSERT_TRUE(second.wait_for_output("ready")) << "after " << time;
    EXPECT_TRUE(contains(second.take_output(), "is 1 of 2"));
    ASSERT_TRUE(first.wait_for_output("is 0 of 2", time + 1));
    second.signal(SIGKILL);
    EXPECT_EQ(second.finish().code, 128 + SIGKILL);
    ASSERT_TRUE(first.wait_for_output("is 0 of 1", time + 2));
  }
  first.signal(SIGTERM);
  EXPECT_EQ(first.finish().code, 128 + SIGTERM);
}

// spec: V5.join a first node at an IPv6 address
TEST(Join, AtAnAddressOfIPv6) {
  if (!listen_on(*SocketAddress::numeric("::1", 0), 1)) GTEST_SKIP() << "no IPv6 here";
  Lines words = first_words("2", kMeet);
  words[4] = "::1";
  Launched first(words);
  const std::string token = token_in(line_of(first));
  EXPECT_TRUE(token.starts_with("[::1]:")) << token;
  const Outcome second = run(join_words(token, kMeet));
  EXPECT_EQ(second.code, 0) << second.err;
  EXPECT_EQ(second.out, "[1] met 01\n");
  EXPECT_EQ(first.finish().code, 0);
}

// spec: V5.join other users of the machine do not see the token in the list of processes
TEST(Join, TheTokenIsInNoListOfProcesses) {
  for (const bool joined : {false, true}) {
    Launched first(first_words("3", "true"));
    const std::string token = token_in(line_of(first));
    std::vector<std::string> words = join_words(token, "true");
    if (joined) words = {"run", "--join=" + token, "sh", "-c", "true", "last-word"};
    Launched second(words, {{"MUSTER_LOG_LEVEL", "info"}});
    ASSERT_TRUE(second.wait_for_error("waiting for 2 other nodes"));
    const std::string list = contents("/proc/" + std::to_string(second.pid()) + "/cmdline");
    EXPECT_TRUE(contains(list, "--join")) << list;
    EXPECT_TRUE(contains(list, "last-word")) << list;
    EXPECT_FALSE(contains(list, token.substr(token.find('/')))) << list;
    second.signal(SIGTERM);
    first.signal(SIGTERM);
    second.finish();
    first.finish();
  }
}

// spec: V5.refusal a token with a wrong character, and options that contradict it
TEST(Join, WhatDoesNotGoTogetherIsRefused) {
  const auto error_of = [](std::vector<std::string> words) {
    words.insert(words.begin(), "run");
    words.push_back("true");
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    return outcome.err;
  };
  const std::string token = "127.0.0.1:1/" + std::string(40, '0');
  EXPECT_TRUE(contains(error_of({"--join", token}), "check digits"));
  EXPECT_TRUE(contains(error_of({"--join", "node0"}), "this is no token"));
  for (const char* name : {"--nnodes=2", "--node-rank=1", "--rdzv-id=a", "--standalone",
                           "--print-join", "--hosts=a,b", "--master-addr=a"}) {
    const std::string error = error_of({"--join", token, name});
    EXPECT_TRUE(contains(error, "--join and --")) << error;
  }
  EXPECT_TRUE(contains(error_of({"--join", ""}), "this is no token")) << "an unset variable";
  EXPECT_TRUE(contains(error_of({"--print-join"}), "--nnodes"));
  for (const char* name : {"--node-rank=0", "--rdzv-endpoint=a", "--rdzv-backend=c10d"}) {
    const std::string error = error_of({"--print-join", "--nnodes", "2", name});
    EXPECT_TRUE(contains(error, "--print-join and --")) << error;
  }
}

// spec: V5.refusal `muster launch`, which cannot take a token, says so
TEST(Join, LaunchTakesNoToken) {
  const std::string token = "127.0.0.1:1/" + std::string(40, '0');
  for (const Lines& option :
       {Lines{"--join", token}, Lines{"--print-join"}, Lines{"--hosts", "a"}}) {
    Lines words = {"launch"};
    words.insert(words.end(), option.begin(), option.end());
    words.push_back("true");
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, option.front())) << outcome.err;
  }
}

// spec: V5.join words of the line are quoted as a shell needs them
TEST(Join, WordsForAShell) {
  EXPECT_EQ(shell_words({"a", "--b=1.5", "", "it's", "$HOME", "x y"}),
            " a --b=1.5 '' 'it'\\''s' '$HOME' 'x y'");
}

}  // namespace
}  // namespace muster::cli::testing
