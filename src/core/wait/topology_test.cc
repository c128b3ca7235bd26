// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/base/process/temporary_folder.h"
#include "core/wait/topology.h"

namespace muster {
namespace {

TEST(HardwareThreads, AreToldInOrderAndEachOnce) {
  const auto numbers = own_hardware_threads();
  ASSERT_FALSE(numbers.empty());
  EXPECT_TRUE(std::ranges::is_sorted(numbers));
  EXPECT_EQ(std::ranges::adjacent_find(numbers), numbers.end());
  EXPECT_TRUE(std::ranges::count(numbers, ::sched_getcpu()) == 1);
}

TEST(HardwareThreads, HoldTheThreadThatIsBoundToOneAndNoOther) {
  const auto all = own_hardware_threads();
  for (const int number : all) {
    std::thread([number] {
      const Status bound = bind_to_hardware_thread(number);
      ASSERT_TRUE(bound) << bound.message();
      EXPECT_EQ(own_hardware_threads(), std::vector<int>{number});
      EXPECT_EQ(::sched_getcpu(), number);
    }).join();
  }
  EXPECT_EQ(own_hardware_threads(), all);
}

TEST(HardwareThreads, ThatAreNotThereAreRefused) {
  const auto all = own_hardware_threads();
  for (const int number : {-1, 8191, 8192, 1 << 20}) {
    const Status bound = bind_to_hardware_thread(number);
    EXPECT_EQ(bound.code(), Code::invalid_argument);
    EXPECT_NE(bound.message().find(std::to_string(number)), std::string::npos) << bound.message();
  }
  EXPECT_EQ(own_hardware_threads(), all);
}

/// A simulated /proc and /sys.
class Cores : public ::testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    const auto whole = std::filesystem::path(root_) / path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  void allow(const std::string& threads) {
    write("proc/self/status", "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t" + threads +
                                  "\nMems_allowed_list:\t0\n");
  }
  void siblings(int thread, const std::string& list) {
    write("sys/devices/system/cpu/cpu" + std::to_string(thread) + "/topology/thread_siblings_list",
          list + "\n");
  }

  const TemporaryFolder folder_{"muster-test-"};
  const std::string& root_ = folder_.path();
};

using Numbers = std::vector<int>;

TEST_F(Cores, CountsTheHardwareThreadsOfOneCoreOnce) {
  allow("0-7");
  EXPECT_EQ(own_cores(root_), (Numbers{0, 1, 2, 3, 4, 5, 6, 7})) << "the system does not tell";
  write("sys/devices/system/cpu/smt/active", "1\n");
  for (const int core : {0, 1, 2}) {
    siblings(core, std::to_string(core) + "," + std::to_string(core + 4));
    siblings(core + 4, std::to_string(core) + "," + std::to_string(core + 4));
  }
  siblings(3, "3");  // a core with a single thread next to those with two
  siblings(7, "7");
  EXPECT_EQ(own_cores(root_), (Numbers{0, 1, 2, 3, 7}));
  allow("0-3");
  for (const int thread : {0, 1, 2, 3}) siblings(thread, thread < 2 ? "0-1" : "2-3");
  EXPECT_EQ(own_cores(root_), (Numbers{0, 2})) << "siblings may be neighbours";
}

TEST_F(Cores, FollowsTheAffinityMask) {
  write("sys/devices/system/cpu/smt/active", "1\n");
  for (const int thread : {4, 5, 8})
    siblings(thread, std::to_string(thread % 4) + "," + std::to_string(thread % 4 + 4));
  siblings(8, "8");
  allow("4-5,8");
  EXPECT_EQ(own_cores(root_), (Numbers{0, 1, 8}))
      << "named by the first thread, also where that one is not ours";
  write("sys/devices/system/cpu/smt/active", "0\n");
  EXPECT_EQ(own_cores(root_), (Numbers{4, 5, 8}));
}

TEST_F(Cores, KnowsTheQuotaOfTheControlGroups) {
  EXPECT_EQ(cpu_quota(root_), 0);
  write("proc/self/cgroup", "0::/jobs/one\n");
  EXPECT_EQ(cpu_quota(root_), 0);
  write("sys/fs/cgroup/jobs/one/cpu.max", "max 100000\n");
  EXPECT_EQ(cpu_quota(root_), 0);
  write("sys/fs/cgroup/jobs/cpu.max", "250000 100000\n");
  EXPECT_EQ(cpu_quota(root_), 2.5);
  write("sys/fs/cgroup/jobs/one/cpu.max", "400000 100000\n");
  EXPECT_EQ(cpu_quota(root_), 2.5) << "the tightest counts";
  write("proc/self/cgroup", "4:cpuset,cpu:/old\n3:cpuacct:/jobs\n0::/\n");
  write("sys/fs/cgroup/cpu/old/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu/old/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpu_quota(root_), 0);
  write("sys/fs/cgroup/cpu/old/cpu.cfs_quota_us", "50000\n");
  EXPECT_EQ(cpu_quota(root_), 0.5);
}

TEST(CoresOfThisProcess, AreAtLeastOneAndAtMostTheQuota) {
  EXPECT_EQ(cores_within(0, 0), 1);
  EXPECT_EQ(cores_within(8, 0), 8);
  EXPECT_EQ(cores_within(8, 2.5), 2);
  EXPECT_EQ(cores_within(8, 0.5), 1);
  EXPECT_EQ(cores_within(2, 16), 2);
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(static_cast<std::size_t>(usable_cores()), own_cores().size());
}

}  // namespace
}  // namespace muster
