// SPDX-License-Identifier: BSD-3-Clause
// The time to make, fill and drop a tensor, microseconds: with torch's own allocator and with the
// shared one, in turn. Prints the medians of many rounds.

#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "core/group/memory/shared_allocator.h"

namespace {

constexpr std::int64_t kSizes[] = {4 << 10, 16 << 10, 17 << 10, 64 << 10,
                                   1 << 20, 16 << 20, 64 << 20};

double seconds_of(std::int64_t bytes, int times, bool fill) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < times; ++i) {
    const auto made = at::empty({bytes}, at::kByte);
    if (fill) std::memset(made.data_ptr(), i, static_cast<std::size_t>(bytes));
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / times;
}

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// On each of `threads` at once; the first one's median.
double measured(std::int64_t bytes, bool fill, bool shared, int threads) {
  muster::use_shared_allocator({.enabled = shared, .private_up_to = 0});
  const int times = static_cast<int>(std::clamp<std::int64_t>((8 << 20) / bytes, 1, 500));
  std::vector<double> rounds;
  const auto work = [&](std::vector<double>* kept) {
    for (int round = 0; round < 31; ++round) {
      const double one = seconds_of(bytes, times, fill);
      if (kept != nullptr) kept->push_back(one);
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(work, nullptr);
  work(&rounds);
  for (auto& other : others) other.join();
  return median(rounds) * 1e6;
}

}  // namespace

int main() {
  std::printf("%10s %9s %12s %12s %12s %12s\n", "bytes", "threads", "made", "shared", "and filled",
              "shared");
  for (const int threads : {1, 2}) {
    for (const std::int64_t bytes : kSizes) {
      std::printf("%10lld %9d", static_cast<long long>(bytes), threads);
      for (const bool fill : {false, true}) {
        const double own = measured(bytes, fill, false, threads),
                     shared = measured(bytes, fill, true, threads);
        std::printf(" %12.2f %12.2f", own, shared);
      }
      std::printf("\n");
    }
  }
}
