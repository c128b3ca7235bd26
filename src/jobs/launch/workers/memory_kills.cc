// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/memory_kills.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <utility>

namespace muster::launch {
namespace {

/// The number after `name` in a file of lines "name number"; 0 if it is not there.
std::uint64_t field_in(const std::string& path, std::string_view name) {
  std::istringstream lines(small_file(path).value_or(""));
  std::string found;
  for (std::uint64_t value = 0; lines >> found >> value;)
    if (found == name) return value;
  return 0;
}

}  // namespace

MemoryKills::MemoryKills(std::string root) : root_(std::move(root)) {
  if (const auto groups = control_groups("memory", root_); !groups.empty()) group_ = groups.front();
  group_taken_ = of_group();
  machine_taken_ = of_machine();
}

std::uint64_t MemoryKills::of_group() const {
  const char* const file = group_.unified ? "/memory.events" : "/memory.oom_control";
  return group_.folder.empty() ? 0 : field_in(group_.folder + file, "oom_kill");
}

std::uint64_t MemoryKills::of_machine() const {
  return field_in(root_ + "/proc/vmstat", "oom_kill");
}

/// " (limit 512 MiB)", or nothing.
std::string MemoryKills::limit() const {
  const char* const file = group_.unified ? "/memory.max" : "/memory.limit_in_bytes";
  const std::string text = small_file(group_.folder + file).value_or("");
  std::uint64_t bytes = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), bytes);
  // Version 1 says "no limit" by a number that no machine has.
  if (read.ec != std::errc() || bytes >= std::uint64_t{1} << 60) return {};
  return " (limit " + std::to_string(bytes >> 20) + " MiB)";
}

std::string MemoryKills::take(bool by_sigkill) {
  if (of_group() > group_taken_) {
    ++group_taken_;
    machine_taken_ = std::min(machine_taken_ + 1, of_machine());  // counts it too
    return "out of memory: the kernel has killed a process of the control group " + group_.folder +
           limit() + "; give the job more memory, or let its ranks use less";
  }
  if (!by_sigkill || of_machine() <= machine_taken_) return {};
  ++machine_taken_;
  return "out of memory, it seems: the kernel has killed a process of this machine for want of it "
         "(oom_kill of /proc/vmstat); dmesg names the process";
}

}  // namespace muster::launch
