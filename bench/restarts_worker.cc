// SPDX-License-Identifier: BSD-3-Clause
// A rank that bench/restarts.py restarts: all_reduce in a loop, a line after each step in a file of
// its own. The lines are those of `work` in bench/restarts.py.
//
//   muster_bench_restarts FOLDER
#include <torch/types.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "muster/distributed.h"

namespace {

/// Now by CLOCK_MONOTONIC, as the script's own times are.
std::int64_t nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "?" : value;
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) return 2;
  const std::int64_t begun = nanoseconds();
  muster::init_process_group();
  const int rank = muster::get_rank(), size = muster::get_world_size();
  const std::string path = std::string(words[1]) + "/" + std::to_string(::getpid());
  const std::string host = variable("MUSTER_BENCH_HOST");
  const std::string restarts = variable("TORCHELASTIC_RESTART_COUNT");
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) return 1;
  for (std::int64_t step = 0;; ++step) {
    // The round's name, which all ranks learn from rank 0: when that process began.
    auto round = torch::tensor({rank == 0 ? begun : std::int64_t{0}}, at::kLong);
    muster::all_reduce(round);
    std::fprintf(file, "%lld %lld %s %lld %d %d %d %s\n", static_cast<long long>(nanoseconds()),
                 static_cast<long long>(round.item<std::int64_t>()), restarts.c_str(),
                 static_cast<long long>(step), rank, size, ::getpid(), host.c_str());
    std::fflush(file);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}
