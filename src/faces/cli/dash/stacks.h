// SPDX-License-Identifier: BSD-3-Clause
/// Where the threads of a rank stand: by what a rank that has called
/// `muster.debug.start_debug_server` writes itself, by py-spy, eu-stack and gdb where they are
/// installed, and by what the kernel says.
#pragma once

#include <string>
#include <vector>

#include "core/trace/analysis.h"

namespace muster::cli {

struct StackSection {
  std::string source;  ///< "faulthandler", "py-spy", "eu-stack", "gdb", "kernel"
  std::string text;
};

struct RankStacks {
  std::vector<StackSection> sections;
  std::vector<std::string> notes;  ///< what is missing, and how to get it
};

/// Whether the process that writes this trace lives in this PID namespace: it holds the file open.
bool is_process_here(const trace::RankTrace& rank);

/// Blocks for some seconds. Stops nothing, unless stacks of C++ are wanted too (`native`): eu-stack
/// or gdb then stops the process, gdb for as long as it reads symbols, and ranks that wait for the
/// process may fail because it is stopped. One call at a time.
RankStacks stacks_of(const trace::RankTrace& rank, bool native);

/// Asks a process for its stacks by the signal of `muster.debug` (SIGRTMIN + 7), if it has a
/// handler for it and the memory file "muster-stacks" that the handler writes to. A process without
/// them gets no signal. Empty: it has not, or has not answered.
std::string ask_for_stacks(std::int64_t pid);

}  // namespace muster::cli
