// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/memory_kills.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "testing/scratch_folder.h"

namespace muster::launch {
namespace {

/// A simulated /proc and /sys.
class Kills : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) const {
    const auto whole = std::filesystem::path(folder_.file("root")) / path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  void count_in_group(int kills) const {
    write("sys/fs/cgroup/jobs/one/memory.events",
          "low 0\nhigh 0\nmax 7\noom 1\noom_kill " + std::to_string(kills) + "\n");
  }
  void count_on_machine(int kills) const {
    write("proc/vmstat", "pgfault 12\noom_kill " + std::to_string(kills) + "\n");
  }
  MemoryKills begin() const { return MemoryKills(folder_.file("root")); }

  const muster::testing::ScratchFolder folder_;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// spec: V10.oom kills of the control group since the job began are told once each, with its limit
TEST_F(Kills, OfTheControlGroup) {
  write("proc/self/cgroup", "0::/jobs/one\n");
  write("sys/fs/cgroup/jobs/one/memory.max", "536870912\n");
  count_in_group(2);
  count_on_machine(5);
  MemoryKills kills = begin();
  EXPECT_EQ(kills.take(true), "") << "those of before are not ours";
  count_in_group(4);
  count_on_machine(7);
  for (const bool by_sigkill : {true, false}) {
    const std::string text = kills.take(by_sigkill);
    EXPECT_TRUE(has(text, "out of memory: ")) << text;
    EXPECT_TRUE(has(text, "/sys/fs/cgroup/jobs/one (limit 512 MiB)")) << text;
  }
  EXPECT_EQ(kills.take(true), "");
}

// spec: V10.oom version 1 of control groups, with no limit of its own
TEST_F(Kills, OfAnOlderControlGroup) {
  write("proc/self/cgroup", "3:cpu:/\n4:memory:/job\n0::/\n");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  const auto count = [&](int kills) {
    write("sys/fs/cgroup/memory/job/memory.oom_control",
          "oom_kill_disable 0\nunder_oom 0\noom_kill " + std::to_string(kills) + "\n");
  };
  count(0);
  MemoryKills kills = begin();
  count(1);
  const std::string text = kills.take(true);
  EXPECT_TRUE(has(text, "/sys/fs/cgroup/memory/job; ")) << text;
}

// spec: V10.oom a kill elsewhere on the machine explains nothing but SIGKILL
TEST_F(Kills, OfTheMachine) {
  write("proc/self/cgroup", "0::/\n");
  count_on_machine(1);
  MemoryKills kills = begin();
  count_on_machine(2);
  EXPECT_EQ(kills.take(false), "");
  EXPECT_TRUE(has(kills.take(true), "/proc/vmstat"));
  EXPECT_EQ(kills.take(true), "");
}

// spec: V10.oom a system without these files says nothing
TEST_F(Kills, AreNoneWhereNothingCountsThem) {
  MemoryKills kills = begin();
  EXPECT_EQ(kills.take(true), "");
}

}  // namespace
}  // namespace muster::launch
