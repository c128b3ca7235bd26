// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/hosts/host_list.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "jobs/launch/node/host.h"
#include "testing/scratch_folder.h"

namespace muster::launch {
namespace {

using muster::testing::ScratchFolder;

/// "a=1 b=-": destinations and numbers of workers.
std::string hosts_text(const Result<std::vector<JobHost>>& hosts) {
  if (!hosts) return hosts.status().message();
  std::string text;
  for (const JobHost& host : *hosts)
    text += (text.empty() ? "" : " ") + host.destination + "=" +
            (host.workers ? std::to_string(*host.workers) : "-");
  return text;
}

// spec: V5.hosts names, addresses of both families, users, and numbers of workers
TEST(HostList, NamesAddressesAndNumbers) {
  EXPECT_EQ(hosts_text(parse_hosts("a")), "a=-");
  EXPECT_EQ(hosts_text(parse_hosts("a,b:4")), "a=- b=4");
  EXPECT_EQ(hosts_text(parse_hosts("10.0.0.1:2,node-3.example.org")),
            "10.0.0.1=2 node-3.example.org=-");
  EXPECT_EQ(hosts_text(parse_hosts("[::1]:2,[fe80::1%eth0],fe80::2")),
            "::1=2 fe80::1%eth0=- fe80::2=-");
  EXPECT_EQ(hosts_text(parse_hosts("me@a:3,me@[::1]:2,you@::1")), "me@a=3 me@::1=2 you@::1=-");
  EXPECT_EQ((*parse_hosts("me@node1:4"))[0].name(), "node1");
  EXPECT_EQ((*parse_hosts("node1"))[0].name(), "node1");
}

// spec: V5.hosts as for mpirun, a name without a number counts as often as it is there
TEST(HostList, NamesWithoutANumberAreCounted) {
  EXPECT_EQ(hosts_text(parse_hosts("a,b,a,a")), "a=3 b=-");
  for (const char* text : {"a:2,a", "a,a:2", "a:2,a:2"})
    EXPECT_NE(hosts_text(parse_hosts(text)).find("a is there twice"), std::string::npos) << text;
}

// spec: V5.refusal what is no machine is refused, above all what ssh would read as an option
TEST(HostList, WhatIsNoMachineIsRefused) {
  for (const char* text :
       {"",    ",",   "a,",   ",a",  "a,,b", "-oProxyCommand=x", "me@-x", "-me@a",  "@a",
        "me@", "a:0", "a:-1", "a:x", "a:",   "a:70000",          "[::1",  "[::1]x", "[]",
        "a b", "a;b", "$(a)", "a`b`"}) {
    const auto hosts = parse_hosts(text);
    ASSERT_FALSE(hosts.ok()) << text;
    EXPECT_EQ(hosts.status().code(), Code::invalid_argument);
    EXPECT_NE(hosts.status().message().find("--hosts"), std::string::npos) << text;
  }
}

// spec: V5.hosts a file of machines, as Open MPI and MPICH write them
TEST(HostList, LinesOfAFile) {
  const std::string text =
      "# the machines\n"
      "node0 slots=4   # the first\n"
      "\n"
      "node1:2\r\n"
      "  [::1] slots=2 max_slots=8\n"
      "node3\n"
      "node4\n"
      "node4\n";
  EXPECT_EQ(hosts_text(parse_host_lines(text, "f")), "node0=4 node1=2 ::1=2 node3=- node4=2");
}

// spec: V5.refusal a mistake in a file is named with its line
TEST(HostList, AMistakeIsNamedWithItsLine) {
  for (const char* line : {"a slots=0", "a slots", "a cpus=2", "a:2 slots=2",
                           "a slots=4 max-slots=2", "a max_slots=2", "-a", "a b"}) {
    const auto hosts = parse_host_lines("ok\n" + std::string(line) + "\n", "the-file");
    ASSERT_FALSE(hosts.ok()) << line;
    EXPECT_NE(hosts.status().message().find("--hostfile the-file, line 2"), std::string::npos)
        << hosts.status().message();
  }
  EXPECT_NE(hosts_text(parse_host_lines("# none\n", "f")).find("names no machine"),
            std::string::npos);
}

// spec: V5.refusal a file that is not there, or is none
TEST(HostList, AFileThatCannotBeRead) {
  const ScratchFolder folder;
  EXPECT_NE(hosts_text(read_host_file(folder.file("absent"))).find("ENOENT"), std::string::npos);
  EXPECT_FALSE(read_host_file(folder.file("")).ok());
  std::ofstream(folder.file("there")) << "a:2\nb\n";
  EXPECT_EQ(hosts_text(read_host_file(folder.file("there"))), "a=2 b=-");
}

TEST(HostList, LoopbackNames) {
  for (const char* name : {"localhost", "127.0.0.1", "127.1.2.3", "::1"})
    EXPECT_TRUE(is_loopback_name(name)) << name;
  for (const char* name : {"node1", "10.0.0.1", "fe80::1", "localhost1"})
    EXPECT_FALSE(is_loopback_name(name)) << name;
}

}  // namespace
}  // namespace muster::launch
