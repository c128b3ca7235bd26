// SPDX-License-Identifier: BSD-3-Clause
/// When a process and its machine began, whether the process stands still, and in which namespaces
/// this one is. The start tells a process from a later one that got its number again; the pid
/// namespace tells whether a number means the same process to two readers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace muster {

/// In the kernel's clock ticks since boot; 0 where there is no such process here; none where that
/// cannot be told now (no descriptor is left), and errno says why. Three system calls: every rank
/// asks for every other.
std::optional<std::uint64_t> process_start(std::int64_t pid);

enum class ProcessState : std::uint8_t {
  running,  ///< or it waits, for a core too
  stopped,  ///< by SIGSTOP, or by a debugger
  unknown,  ///< there is no such process here, its main thread has ended, or /proc does not say
};
/// The state of the process `pid` that started at `start_time`, as the kernel tells it.
ProcessState process_state(std::int64_t pid, std::uint64_t start_time);

/// The signal that has ended, or is just ending, the process `pid` that started at `start_time`; 0
/// if it ended by itself, or the kernel does not say how. None while it runs, and once its parent
/// has collected its status.
std::optional<int> ending_signal(std::int64_t pid, std::uint64_t start_time);

/// Another one after every start of the machine; empty where /proc does not tell, or not now. Read
/// anew each time.
std::string boot_id();

/// Inode of the calling thread's namespace of a kind: "pid", "net", "user" or "time". 0 if /proc
/// does not tell.
std::uint64_t namespace_inode(const char* kind);

}  // namespace muster
