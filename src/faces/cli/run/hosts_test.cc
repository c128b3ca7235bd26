// SPDX-License-Identifier: BSD-3-Clause
// `muster run --hosts` through a script in place of ssh.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "faces/cli/testing/launched.h"
#include "faces/cli/testing/ssh_standin.h"
#include "testing/reserved_port.h"
#include "testing/scratch_folder.h"

namespace muster::cli::testing {
namespace {

using Lines = std::vector<std::string>;

/// `muster run` on machines, whose nodes meet at a free port here.
std::vector<std::string> hosts_words(const SshStandin& ssh, const std::string& hosts,
                                     std::vector<std::string> rest) {
  std::vector<std::string> words = {"run",
                                    "--hosts",
                                    hosts,
                                    "--ssh",
                                    ssh.command(),
                                    "--master-port",
                                    std::to_string(muster::testing::reserve_port())};
  words.insert(words.end(), rest.begin(), rest.end());
  return words;
}

pid_t pid_in(const std::string& file) { return static_cast<pid_t>(std::stol(contents(file))); }

// spec: V5.hosts a node on each machine with so many workers; their lines have their ranks before
// them; the program and its arguments come as they are
TEST(Hosts, ANodeOnEachMachine) {
  const SshStandin ssh;
  const std::string script = "echo $RANK $WORLD_SIZE $GROUP_RANK \"$1\"; exec " + kWorker + " meet";
  const Outcome outcome = run(hosts_words(ssh, "127.0.0.1:2,localhost",
                                          {"sh", "-c", script, "-", "it's \"$HOME\" & more"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(sorted_lines(outcome.out), (Lines{"[0] 0 3 0 it's \"$HOME\" & more", "[0] met 012",
                                              "[1] 1 3 0 it's \"$HOME\" & more", "[1] met 012",
                                              "[2] 2 3 1 it's \"$HOME\" & more", "[2] met 012"}));
  EXPECT_EQ(outcome.err, "");
  EXPECT_EQ(count_of(contents(ssh.words_file()), "BatchMode=yes"), 2);
}

// spec: V5.hosts --hostfile names the machines too, and one machine needs no place to meet
TEST(Hosts, MachinesOfAFile) {
  const SshStandin ssh;
  const std::string file = ssh.folder() + "/machines";
  std::ofstream(file) << "# one machine\nnode0 slots=2\n";
  const Outcome outcome = run({"run", "--hostfile", file, "--ssh", ssh.command(), "sh", "-c",
                               "echo $HOST $RANK of $WORLD_SIZE"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(sorted_lines(outcome.out), (Lines{"[0] node0 0 of 2", "[1] node0 1 of 2"}));
}

// spec: V5.hosts the secret is handed over by standard input: it stands in no argument list and in
// no environment, and all nodes have the same
TEST(Hosts, TheSecretIsOnNoCommandLine) {
  const SshStandin ssh;
  const std::string script =
      "echo secret=$(tail -n 1 /dev/fd/${MUSTER_SECRET_FD#*:}).; exec sleep infinity";
  // No other test has this one: all processes of the machine are looked at.
  const std::string text = "a given secret of process " + std::to_string(::getpid());
  const Launched::Variables none, given = {{"MUSTER_SECRET", text}};
  for (const auto& variables : {none, given}) {
    Launched launched(hosts_words(ssh, "127.0.0.1,localhost", {"sh", "-c", script}), variables);
    ASSERT_TRUE(launched.wait_for_output(".\n", 2));
    std::string everything = contents(ssh.words_file());
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      everything += contents(entry.path().string() + "/cmdline");
      everything += contents(entry.path().string() + "/environ");
    }
    launched.signal(SIGTERM);
    const Outcome outcome = launched.finish();
    const std::size_t at = outcome.out.find("secret=") + 7;
    const std::string secret = outcome.out.substr(at, outcome.out.find('.', at) - at);
    EXPECT_EQ(secret.size(), variables.empty() ? 87U : 64U) << "ours, or a stretched one";
    EXPECT_EQ(count_of(outcome.out, secret), 2);
    EXPECT_TRUE(contains(everything, "MUSTER_SECRET_FD=")) << "the scan saw no worker";
    EXPECT_FALSE(contains(everything, secret));
    EXPECT_FALSE(contains(everything, text));
    EXPECT_FALSE(contains(outcome.err, secret));
  }
}

// spec: V5.hosts the folder and the chosen variables, of those of ours all
TEST(Hosts, FolderAndVariables) {
  const SshStandin ssh;
  const Launched::Variables variables = {
      {"MUSTER_TRACE_ENTRIES", "77"}, {"CHOSEN", "it's $one"}, {"OTHER", "not for nodes"}};
  const std::string script = "echo $PWD,$CHOSEN,$GIVEN,$OTHER,$MUSTER_TRACE_ENTRIES; cat; echo end";
  const Outcome outcome = run(
      hosts_words(ssh, "127.0.0.1",
                  {"--wdir", "/usr/bin", "-x", "CHOSEN", "--env", "GIVEN=a=b", "sh", "-c", script}),
      variables);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "[0] /usr/bin,it's $one,a=b,,77\n[0] end\n");
}

// spec: V5.hosts options reach the nodes, wherever they were given
TEST(Hosts, OptionsReachTheNodes) {
  const SshStandin ssh;
  const std::string file = ssh.folder() + "/job.toml";
  std::ofstream(file) << "hosts = '127.0.0.1,localhost'\nrole = 'trainer'\n";
  const Outcome outcome =
      run({"run", "--config", file, "--ssh", ssh.command(), "--master-port",
           std::to_string(muster::testing::reserve_port()), "-np", "2",
           "--log-line-prefix-template", "<${rank}> ", "sh", "-c", "echo $ROLE_NAME $ROLE_RANK"},
          {{"PET_RDZV_ID", "job 7"}});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(sorted_lines(outcome.out),
            (Lines{"<0> trainer 0", "<1> trainer 1", "<2> trainer 2", "<3> trainer 3"}));
}

// spec: V5.hosts the exit code is that of the rank that failed first, and the others are ended
TEST(Hosts, AFailureEndsTheOtherNodes) {
  const SshStandin ssh;
  const std::string script =
      kWorker + " meet; test $GROUP_RANK = 1 && exit 6; exec " + kWorker + " wait 0";
  const Outcome outcome = run(hosts_words(ssh, "127.0.0.1,localhost", {"sh", "-c", script}));
  EXPECT_EQ(outcome.code, 6) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "FAILED: rank 1")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "FAILED: the node on ")) << outcome.err;
}

// spec: V5.hosts a signal ends all nodes, and the exit code tells which
TEST(Hosts, ASignalEndsAllNodes) {
  const SshStandin ssh;
  for (const int number : {SIGINT, SIGTERM}) {
    Launched launched(hosts_words(ssh, "127.0.0.1,localhost", {kWorker, "wait", "0"}));
    ASSERT_TRUE(launched.wait_for_output("ready", 2));
    launched.signal(number);
    const Outcome outcome = launched.finish();
    EXPECT_EQ(outcome.code, 128 + number) << outcome.err;
    EXPECT_EQ(count_of(outcome.out, "got SIG"), 2) << outcome.out;
    // The second node may hear of the end from the first one before.
    EXPECT_TRUE(contains(outcome.out, number == SIGINT ? "got SIGINT" : "got SIGTERM"))
        << outcome.out;
  }
}

// spec: V5.hosts a signal that ends nothing reaches the workers
TEST(Hosts, OtherSignalsArePassedOn) {
  const SshStandin ssh;
  Launched launched(hosts_words(ssh, "127.0.0.1,localhost", {kWorker, "wait", "0"}));
  ASSERT_TRUE(launched.wait_for_output("ready", 2));
  launched.signal(SIGUSR1);
  const Outcome outcome = launched.finish();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(count_of(outcome.out, "got SIGUSR1"), 2) << outcome.out;
}

// spec: V5.hosts a third signal waits for no machine
TEST(Hosts, AThirdSignalWaitsForNothing) {
  const SshStandin ssh;
  Launched launched(hosts_words(
      ssh, "127.0.0.1,deaf", {"--master-addr", "127.0.0.1", "--shutdown-timeout", "1000", "true"}));
  ASSERT_TRUE(launched.wait_for_error("deaf and here"));
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) launched.signal(number);
  const int code = launched.finish().code - 128;
  EXPECT_TRUE(code == SIGINT || code == SIGTERM || code == SIGHUP) << code;
}

// spec: V5.hosts who loses patience with the others hears which machine was lost first
TEST(Hosts, AMachineThatIsLostBeforeASignalIsNamed) {
  const muster::testing::ScratchFolder folder;
  const std::string ssh = folder.file("ssh"), fifo = folder.file("fifo");
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  // The ssh of the second machine stops the launcher once that has collected the first one's.
  std::ofstream(ssh) << "#!/bin/bash\nfifo=" << fifo << R"(
if [[ $* == *lost* ]]; then echo $$ > "$fifo"; exit 255; fi
trap '' TERM INT
read -r gone < "$fifo"
tail --pid=$gone -f /dev/null
kill -INT $PPID; kill -TERM $PPID; kill -HUP $PPID
exec sleep infinity
)";
  ::chmod(ssh.c_str(), 0700);
  const Outcome outcome =
      run({"run", "--hosts", "deaf,lost", "--ssh", ssh, "--shutdown-timeout", "1000", "true"});
  EXPECT_GT(outcome.code, 128) << outcome.err;
  EXPECT_NE(outcome.code, 255) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "FAILED: the node on lost: ssh ended with exit code 255"))
      << outcome.err;
}

// spec: V5.hosts an ssh that is lost ends the nodes on both sides of it, and its machine is named
TEST(Hosts, ALostConnectionEndsAllNodes) {
  const SshStandin ssh(true);
  Fifo alive;
  const std::string script = "exec 9>" + alive.path() + "; exec " + kWorker + " wait 0";
  Launched launched(hosts_words(ssh, "127.0.0.1,localhost", {"sh", "-c", script}));
  ASSERT_TRUE(alive.open());
  ASSERT_TRUE(launched.wait_for_output("ready", 2));
  ASSERT_EQ(::kill(pid_in(ssh.pid_file("localhost")), SIGKILL), 0);
  EXPECT_TRUE(alive.wait_for_end()) << "the workers of both nodes";
  const Outcome outcome = launched.finish();
  EXPECT_EQ(outcome.code, 128 + SIGKILL) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "FAILED: the node on localhost: ssh ended with SIGKILL"))
      << outcome.err;
}

// spec: V5.hosts the end of the launcher, however it comes, is the end of all nodes
TEST(Hosts, NodesEndWithTheirLauncher) {
  for (const bool apart : {false, true}) {
    const SshStandin ssh(apart);
    Fifo alive;
    const std::string script = "exec 9>" + alive.path() + "; exec " + kWorker + " wait 0";
    Launched launched(hosts_words(ssh, "127.0.0.1,localhost", {"sh", "-c", script}));
    ASSERT_TRUE(alive.open());
    ASSERT_TRUE(launched.wait_for_output("ready", 2));
    launched.signal(SIGKILL);
    EXPECT_TRUE(alive.wait_for_end());
    EXPECT_EQ(launched.finish().code, 128 + SIGKILL);
  }
}

// spec: V5.hosts a machine that cannot be reached is named, with what ssh said, and the others end
TEST(Hosts, AMachineThatCannotBeReached) {
  const SshStandin ssh;
  const Outcome outcome = run(
      hosts_words(ssh, "127.0.0.1,refused", {"--master-addr", "127.0.0.1", kWorker, "wait", "0"}));
  EXPECT_EQ(outcome.code, 255) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "FAILED: the node on refused: ssh ended with exit code 255"))
      << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "  | ssh: connect to host refused port 22")) << outcome.err;
}

// spec: V5.refusal a program, a folder or a muster that is not there is named
TEST(Hosts, WhatIsMissingThere) {
  const SshStandin ssh;
  const auto outcome_of = [&](std::vector<std::string> options) {
    return run(hosts_words(ssh, "node0", std::move(options)));
  };
  const Outcome program = outcome_of({"/no/such/program"});
  EXPECT_EQ(program.code, 127);
  EXPECT_TRUE(contains(program.err, "/no/such/program")) << program.err;
  const Outcome folder = outcome_of({"--wdir", "/no/such/folder", "true"});
  EXPECT_EQ(folder.code, 126);
  EXPECT_TRUE(contains(folder.err, "/no/such/folder")) << folder.err;
  EXPECT_TRUE(contains(folder.err, "FAILED: the node on node0")) << folder.err;
  const Outcome muster = outcome_of({"--remote-muster", "/no/such/muster", "true"});
  EXPECT_EQ(muster.code, 127);
  EXPECT_TRUE(contains(muster.err, "is there no /no/such/muster?")) << muster.err;
  const Outcome none = run({"run", "--hosts", "node0", "--ssh", "no-such-ssh", "true"});
  EXPECT_EQ(none.code, 1);
  EXPECT_TRUE(contains(none.err, "\"no-such-ssh\" was not found on PATH")) << none.err;
}

// spec: V5.refusal what cannot be right together is refused before anything is started
TEST(Hosts, WhatDoesNotGoTogetherIsRefused) {
  const std::vector<std::vector<std::string>> kinds = {
      {"--standalone"},
      {"--node-rank", "0"},
      {"--rdzv-endpoint", "a:29400"},
      {"--rdzv-backend", "c10d"},
      {"--local-addr", "10.0.0.1"},
      {"--hostfile", "/dev/null"},
      {"--nnodes", "3"},
      {"--nnodes", "1:2"},
      {"--no-agent-store"},
      {"--env", "MUSTER_SECRET=x"},
      {"--env", "NOT_SET_HERE"},
      {"--redirects", "7"},
  };
  for (std::vector<std::string> words : kinds) {
    const std::string name = words.front();
    words.insert(words.begin(), {"run", "--hosts", "a,b", "--ssh", "false"});
    words.push_back("true");
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 2) << name << outcome.err;
    EXPECT_TRUE(contains(outcome.err, name)) << outcome.err;
  }
  EXPECT_TRUE(
      contains(run({"run", "--hosts", "a:2,b:2", "-n", "2", "true"}).err, "--nproc-per-node"));
  EXPECT_TRUE(contains(run({"run", "--hosts", "localhost,b", "true"}).err, "--master-addr"));
  EXPECT_TRUE(contains(run({"run", "--wdir", "/tmp", "true"}).err, "--wdir is for --hosts"));
  EXPECT_TRUE(contains(run({"run", "--hosts", "a,b"}).err, "no program was given"));
  // A variable of the shell that is not set.
  EXPECT_TRUE(contains(run({"run", "--hosts", "", "true"}).err, "names no machine"));
  EXPECT_TRUE(contains(run({"run", "--hostfile", "", "true"}).err, "cannot be read"));
}

// spec: V5.hosts two jobs of one secret that meet at one place: the second is refused, and takes no
// place of a node that the first one waits for
TEST(Hosts, AnotherJobAtTheSamePlace) {
  const SshStandin ssh;
  const Launched::Variables variables = {{"MUSTER_SECRET", "a given secret for the tests"},
                                         {"MUSTER_LOG_LEVEL", "info"}};
  auto words =
      hosts_words(ssh, "127.0.0.1,deaf", {"--master-addr", "127.0.0.1", "sh", "-c", "echo began"});
  Launched first(words, variables);
  ASSERT_TRUE(first.wait_for_error("waiting for 1 other node"));
  words[2] = "127.0.0.1,localhost";
  const Outcome second = run(words, variables);
  EXPECT_EQ(second.code, 1) << second.err;
  EXPECT_EQ(second.out, "");
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) first.signal(number);
  const Outcome outcome = first.finish();
  EXPECT_GT(outcome.code, 128) << outcome.err;
  EXPECT_EQ(outcome.out, "");
}

// spec: V5.hosts --nnodes may say the same as the list
TEST(Hosts, TheSameNumberOfNodes) {
  const SshStandin ssh;
  const Outcome outcome =
      run(hosts_words(ssh, "127.0.0.1,localhost", {"--nnodes", "2", kWorker, "meet"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
}

}  // namespace
}  // namespace muster::cli::testing
