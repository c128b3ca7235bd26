// SPDX-License-Identifier: BSD-3-Clause
// `muster doctor`: its lines and its verdict.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "faces/cli/testing/launched.h"

namespace muster::cli::testing {
namespace {

/// The names of all lines.
std::vector<std::string> names_in(const nlohmann::json& told) {
  std::vector<std::string> names;
  for (const auto& each : told["findings"]) names.push_back(each.value("what", ""));
  return names;
}

std::string last_line(std::string text) {
  while (text.ends_with('\n')) text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

// spec: V10.doctor the lines tell of torch, Python, the processor and its instructions, memory,
// NUMA and limits, and the last is a verdict that the exit code agrees with
TEST(Doctor, EndsWithAVerdict) {
  const Outcome text = run({"doctor"});
  const std::string verdict = last_line(text.out);
  EXPECT_TRUE(verdict.starts_with("verdict ")) << text.out;
  EXPECT_EQ(contains(verdict, " ready: "), text.code == 0) << text.out;
  EXPECT_EQ(contains(verdict, "not ready; look at: "), text.code == 1) << text.out;
  EXPECT_EQ(contains(text.out, "<-- look here"), text.code == 1) << text.out;
  const auto told = nlohmann::json::parse(run({"doctor", "--json"}).out, nullptr, false);
  const auto names = names_in(told);
  for (const char* name : {"muster", "built with", "Python", "system", "processor", "cores",
                           "NUMA nodes", "GPUs", "/dev/shm", "memfd", "ptrace scope", "open files",
                           "processes", "locked memory", "address space", "core files", "pidfd"})
    EXPECT_EQ(std::count(names.begin(), names.end(), name), 1) << name << "\n" << text.out;
}

// spec: V10.doctor what is in the way is named by the verdict
// spec: V4.json doctor --json tells the same
TEST(Doctor, NamesWhatIsInTheWay) {
  const auto few_files = [] {
    const rlimit few{64, 64};
    if (::setrlimit(RLIMIT_NOFILE, &few) != 0) ::_exit(127);
  };
  const Launched::Variables wrong = {{"MUSTER_PYTHON", "/nowhere/python"}};
  const Outcome text = Launched({"doctor"}, wrong, few_files).finish();
  EXPECT_EQ(text.code, 1) << text.out;
  const std::string verdict = last_line(text.out);
  EXPECT_TRUE(contains(verdict, "not ready; look at: Python, ")) << text.out;
  EXPECT_TRUE(contains(verdict, "open files")) << text.out;
  const Outcome json = Launched({"doctor", "--json"}, wrong, few_files).finish();
  EXPECT_EQ(json.code, 1);
  const auto told = nlohmann::json::parse(json.out, nullptr, false);
  ASSERT_TRUE(told.is_object()) << json.out;
  EXPECT_EQ(told.value("ready", true), false);
  EXPECT_TRUE(contains(told["in_the_way"].dump(), "open files")) << json.out;
  for (const auto& each : told["findings"])
    EXPECT_EQ(each["good"] == false, contains(told["in_the_way"].dump(), each["what"].dump()))
        << each;
}

}  // namespace
}  // namespace muster::cli::testing
