// SPDX-License-Identifier: BSD-3-Clause
/// Running a line of the shell to its end.
#pragma once

#include <sys/wait.h>

#include <cstddef>
#include <cstdio>
#include <string>

namespace muster::testing {

struct Ended {
  int code = -1;  ///< 128 and the signal's number for one that killed it; -1: it did not start
  std::string output;
};

/// `line` with nothing to read. `output` has both of its streams.
inline Ended run_shell(const std::string& line) {
  Ended ended;
  FILE* const pipe = ::popen((line + " 2>&1 </dev/null").c_str(), "re");
  if (pipe == nullptr) return ended;
  char bytes[4096];
  while (const std::size_t n = std::fread(bytes, 1, sizeof bytes, pipe))
    ended.output.append(bytes, n);
  const int status = ::pclose(pipe);
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return ended;
}

}  // namespace muster::testing
