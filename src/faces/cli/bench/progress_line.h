/// How far a benchmark has come.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

namespace muster::cli::bench {

/// Rewrites one line of the terminal; silent elsewhere.
class ProgressLine {
 public:
  explicit ProgressLine(std::size_t all) : all_(all), shown_(::isatty(STDERR_FILENO) == 1) {}
  void next(const std::string& what) {
    ++done_;
    if (shown_) std::fprintf(stderr, "\r\033[K[%zu/%zu] %s", done_, all_, what.c_str());
  }
  void clear() const {
    if (shown_) std::fprintf(stderr, "\r\033[K");
  }

 private:
  std::size_t all_, done_ = 0;
  bool shown_;
};

}  // namespace muster::cli::bench
