// SPDX-License-Identifier: BSD-3-Clause
/// Whether the kernel has killed processes for want of memory.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/process/limits.h"

namespace muster::launch {

/// Counts the kills of the control group of this process, in which its workers are too, and of the
/// whole machine. A kill is counted before the process ends.
class MemoryKills {
 public:
  /// `root`: where /proc and /sys stand, for tests.
  explicit MemoryKills(std::string root = "");

  /// Explains an end of a worker. It takes one of the kills since the construction that no other
  /// end has taken; empty if there is none. A kill elsewhere on the machine explains SIGKILL alone:
  /// with another exit, only a process of this control group can have to do with it.
  std::string take(bool by_sigkill);

 private:
  std::uint64_t of_group() const;
  std::uint64_t of_machine() const;
  std::string limit() const;

  std::string root_;
  ControlGroup group_;  ///< the folder is empty if there is none
  std::uint64_t group_taken_ = 0, machine_taken_ = 0;
};

}  // namespace muster::launch
