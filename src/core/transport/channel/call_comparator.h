// SPDX-License-Identifier: BSD-3-Clause
/// Compares the calls of a group's members. Private to `transport/`; under the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/transport/channel/fingerprint.h"
#include "muster/status.h"

namespace muster::transport {

class CallComparator {
 public:
  using CallOfRank = std::pair<int, Fingerprint>;

  /// `rules` may be null: then calls are equal or not.
  CallComparator(const FingerprintRules* rules, int rank) : rules_(rules), rank_(rank) {}

  /// This member makes `call`. Returns the other members' calls of the same number that arrived
  /// earlier.
  std::vector<CallOfRank> begin(const Fingerprint& call);
  /// Compares a call of `source` with ours of the same number. Success if they agree or if ours has
  /// not been made yet (it is compared then); else a Code::mismatch that names both.
  Status check(int source, const Fingerprint& call) {
    return call.sequence == 0 ? Status() : check_numbered(source, call);
  }
  void forget_early() { early_.clear(); }
  /// "all_reduce(SUM, float32, 1024 elements)", or "a message of float32".
  std::string describe(const Fingerprint& call) const;

 private:
  struct BegunCall {
    Fingerprint call;
    bool valid = false;
  };
  static constexpr std::size_t kRememberedCalls = 128;  // limit: memory

  Status check_numbered(int source, const Fingerprint& call);
  Status mismatch(int source, const Fingerprint& theirs, const Fingerprint& ours) const;

  const FingerprintRules* const rules_;
  const int rank_;
  std::vector<BegunCall> begun_{kRememberedCalls};
  std::uint64_t last_begun_ = 0;
  std::map<std::uint64_t, std::vector<CallOfRank>>
      early_;  // other members' calls that have not begun here
};

}  // namespace muster::transport
