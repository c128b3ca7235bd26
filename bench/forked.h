// SPDX-License-Identifier: BSD-3-Clause
/// Measurements in processes that are forked here, and what those share.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <vector>

namespace muster_bench {

inline constexpr int kMostRanks = 128;

using Clock = std::chrono::steady_clock;
inline double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

/// Memory that the processes share.
struct Board {
  std::atomic<int> ready{0};
  std::atomic<Clock::rep> came{0};
  alignas(128) std::atomic<int> there{
      0};  ///< flags of two processes, each in a cache line of its own
  alignas(128) std::atomic<int> back{0};
  alignas(128) double figures[kMostRanks] = {};
};

/// Runs `body(rank, board)` in `count` processes; a body calls `meet` before what it measures. The
/// largest figure; negative where one failed.
inline double in_processes(int count, const std::function<void(int, Board&)>& body) {
  void* memory =
      ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return -1;
  auto* board = new (memory) Board;
  std::vector<pid_t> children;
  for (int rank = 0; rank < count; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      int status = 1;
      try {
        body(rank, *board);
        status = 0;
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
      ::_exit(status);
    }
    children.push_back(child);
  }
  bool good = true;
  for (const pid_t child : children) {
    int status = 0;
    good = ::waitpid(child, &status, 0) == child && status == 0 && good;
  }
  const double largest = *std::max_element(board->figures, board->figures + count);
  ::munmap(memory, sizeof(Board));
  return good ? largest : -1;
}

/// All are there before anything is measured.
inline void meet(Board& board, int count) {
  board.ready.fetch_add(1);
  while (board.ready.load() < count) ::usleep(50);
}

}  // namespace muster_bench
