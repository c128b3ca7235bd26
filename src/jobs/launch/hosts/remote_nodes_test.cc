// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/hosts/remote_nodes.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace muster::launch {
namespace {

/// A script in place of ssh, in which $1 is the machine.
RemoteOptions with_script(const std::string& script) {
  RemoteOptions options;
  options.ssh = {"/bin/sh", "-c", "shift $(($# - 2)); " + script};
  options.muster = "/opt/muster";
  options.ending_timeout = std::chrono::milliseconds(100);
  return options;
}

std::vector<RemoteNode> nodes_on(const std::vector<std::string>& machines) {
  std::vector<RemoteNode> nodes;
  for (const std::string& each : machines) nodes.push_back({each, NodeOrder{}});
  return nodes;
}

// spec: V5.hosts the user's options of ssh go before ours, and the path of muster is one word there
TEST(RemoteNodes, TheWordsOfSsh) {
  RemoteOptions options;
  options.ssh = {"ssh", "-p", "2222"};
  options.muster = "/opt/it's/muster";
  options.connect_timeout = std::chrono::milliseconds(1500);
  EXPECT_EQ(ssh_words(options, "me@node1"),
            (std::vector<std::string>{"ssh", "-p", "2222", "-T", "-o", "BatchMode=yes", "-o",
                                      "ConnectTimeout=2", "-o", "ServerAliveInterval=10", "-o",
                                      "ServerAliveCountMax=3", "me@node1",
                                      "exec '/opt/it'\\''s/muster' node"}));
}

// spec: V5.hosts nodes that do not end lose their connection after a time, whatever has failed
TEST(RemoteNodes, ThoseThatDoNotEndAreCut) {
  const auto code_of = [](const std::string& failure) {
    const std::string deaf = "trap '' TERM; while read -r line; do :; done; exec sleep infinity";
    return run_remote_nodes(with_script("test $1 = bad && " + failure + "; " + deaf),
                            nodes_on({"deaf", "bad"}));
  };
  EXPECT_EQ(code_of("exit 3"), 3);
  EXPECT_EQ(code_of("exit 255"), 255);
  EXPECT_EQ(code_of("kill -9 $$"), 137);
}

// spec: V5.hosts a node may end before the others without harm
TEST(RemoteNodes, AllSucceed) {
  EXPECT_EQ(run_remote_nodes(with_script("exit 0"), nodes_on({"a", "b", "c"})), 0);
}

// spec: V5.hosts an ssh that cannot be started ends those that were
TEST(RemoteNodes, NoSsh) {
  RemoteOptions options = with_script("");
  options.ssh = {"/no/such/ssh"};
  EXPECT_EQ(run_remote_nodes(options, nodes_on({"a"})), 1);
}

}  // namespace
}  // namespace muster::launch
