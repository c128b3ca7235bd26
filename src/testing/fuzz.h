// SPDX-License-Identifier: BSD-3-Clause
/// Bytes that nobody should send: random ones, and good ones damaged. From the seed of the test
/// run, so that a failing run replays.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "testing/budget.h"
#include "testing/seed.h"

namespace muster::testing {

/// How long one fuzzer plays:
///
///   an ordinary run        so many rounds as the test says
///   MUSTER_FUZZ_SECONDS=n  n seconds, as CI has it
///   MUSTER_TEST_LONG=1     half a minute
///
///   for (FuzzRun run(5000); run.goes_on();) ...
class FuzzRun {
 public:
  explicit FuzzRun(int ordinary) : ordinary_(ordinary) {
    const double seconds =
        budget_variable("MUSTER_FUZZ_SECONDS", long_tests() ? test_budget(0, 30).count() : 0);
    if (seconds <= 0) return;
    timed_ = true;
    until_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }
  bool goes_on() {
    if (timed_ ? rounds_ > 0 && Clock::now() >= until_ : rounds_ >= ordinary_) return false;
    ++rounds_;
    return true;
  }
  /// Number of rounds that have begun.
  int rounds() const { return rounds_; }

 private:
  using Clock = std::chrono::steady_clock;
  const int ordinary_;
  bool timed_ = false;
  Clock::time_point until_ = Clock::now();
  int rounds_ = 0;
};

/// Plays `round()` for as long. The number of rounds.
template <class Round>
int fuzz_for_a_while(int ordinary, Round round) {
  FuzzRun run(ordinary);
  while (run.goes_on()) round();
  return run.rounds();
}

class Fuzz {
 public:
  /// `salt` keeps the fuzzers of a run apart.
  explicit Fuzz(std::uint64_t salt) : random_(test_seed() * 1000003 + salt) {}

  std::uint64_t word() { return random_(); }
  std::size_t below(std::size_t bound) { return random_() % bound; }
  bool one_in(std::size_t many) { return below(many) == 0; }

  /// Up to `most` random bytes.
  std::string noise(std::size_t most) {
    std::string bytes(below(most + 1), '\0');
    for (char& each : bytes) each = static_cast<char>(word());
    return bytes;
  }
  /// Up to `most` characters of `alphabet`: texts that almost say something.
  std::string babble(std::size_t most, std::string_view alphabet) {
    std::string text(below(most + 1), '\0');
    for (char& each : text) each = alphabet[below(alphabet.size())];
    return text;
  }

  /// `good` with one to four things wrong: bits and bytes changed, numbers replaced by those at the
  /// limits, pieces cut off, taken out, doubled or put in.
  std::string damaged(std::string good) {
    for (std::size_t times = 1 + below(4); times > 0; --times) damage(good);
    return good;
  }
  /// Cut anywhere.
  std::string cut(std::string_view good) {
    return std::string(good.substr(0, below(good.size() + 1)));
  }

  /// In pieces of random lengths, mostly short.
  std::vector<std::string_view> pieces(std::string_view bytes) {
    std::vector<std::string_view> all;
    while (!bytes.empty()) {
      const std::size_t length = std::min(bytes.size(), 1 + below(one_in(3) ? 1000 : 8));
      all.push_back(bytes.substr(0, length));
      bytes.remove_prefix(length);
    }
    return all;
  }
  std::vector<std::string_view> pieces(std::string&&) = delete;  // they are views

 private:
  void damage(std::string& bytes) {
    if (bytes.empty()) {
      bytes = noise(20);
      return;
    }
    const std::size_t at = below(bytes.size());
    switch (below(7)) {
      case 0: bytes[at] = static_cast<char>(bytes[at] ^ 1 << below(8)); break;
      case 1: bytes[at] = static_cast<char>(word()); break;
      case 2: {
        constexpr std::uint64_t kLimits[] = {0,
                                             1,
                                             0x7f,
                                             0x80,
                                             0xff,
                                             0x7fff,
                                             0xffff,
                                             0x7fffffff,
                                             0x80000000,
                                             0xffffffff,
                                             0x100000000,
                                             0x7fffffffffffffff,
                                             0x8000000000000000,
                                             0xffffffffffffffff};
        const std::uint64_t limit = kLimits[below(std::size(kLimits))];
        std::memcpy(bytes.data() + at, &limit,
                    std::min<std::size_t>(std::size_t{1} << below(4), bytes.size() - at));
        break;
      }
      case 3: bytes.resize(at); break;
      case 4: bytes.erase(at, 1 + below(16)); break;
      case 5: bytes.insert(at, bytes.substr(below(bytes.size()), 1 + below(64))); break;
      default: bytes.insert(at, noise(16)); break;
    }
  }

  std::mt19937_64 random_;
};

}  // namespace muster::testing
