/// Bytes that nobody should send: random ones, and good ones damaged. From the seed of the test run, so that a failing run replays.
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

#include "muster/testing/budget.h"
#include "muster/testing/seed.h"

namespace muster::testing {

/// `ordinary` rounds, fifty times as many in long runs.
inline int fuzz_rounds(int ordinary) { return long_tests() ? 50 * ordinary : ordinary; }

/// Plays `round()` so often, in long runs for half a minute. The number of rounds.
template <class Round>
int fuzz_for_a_while(int ordinary, Round round) {
  const auto until = std::chrono::steady_clock::now() + test_budget(0, 30);
  int rounds = 0;
  for (; long_tests() ? std::chrono::steady_clock::now() < until : rounds < ordinary; ++rounds) round();
  return rounds;
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

  /// `good` with one to four things wrong: bits and bytes changed, numbers replaced by those at the limits, pieces cut off, taken out,
  /// doubled or put in.
  std::string damaged(std::string good) {
    for (std::size_t times = 1 + below(4); times > 0; --times) damage(good);
    return good;
  }
  /// Cut anywhere.
  std::string cut(std::string_view good) { return std::string(good.substr(0, below(good.size() + 1))); }

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
        std::memcpy(bytes.data() + at, &limit, std::min<std::size_t>(std::size_t{1} << below(4), bytes.size() - at));
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
