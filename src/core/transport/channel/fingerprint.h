// SPDX-License-Identifier: BSD-3-Clause
/// Describes the call that a message belongs to, so that members that make different calls find out
/// at once.
///
/// The transport only carries and compares; what the numbers mean is written in
/// `core/collective/op.h`, which hands the fabric its `FingerprintRules`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/base/bytes.h"

namespace muster::transport {

/// 32 bytes, copied to the wire as they are.
struct Fingerprint {
  std::uint64_t sequence =
      0;  ///< number of the collective on its channel, from 1; 0: point-to-point
  std::uint8_t op = 0;
  std::uint8_t dtype = 0;
  std::uint8_t reduce = 0;
  std::uint8_t flags = 0;
  std::int32_t root = -1;
  std::uint64_t count = 0;   ///< elements, if the operation requires equal counts; else 0
  std::uint64_t digest = 0;  ///< of anything else that must agree; else 0

  bool operator==(const Fingerprint&) const = default;
};
static_assert(sizeof(Fingerprint) == 32);

inline void copy_words(Fingerprint& to, const Fingerprint& from) {
  muster::copy_words<sizeof(Fingerprint) / 8>(&to, &from);
}

/// How two members' calls with the same sequence compare and read. Pure, thread-safe.
class FingerprintRules {
 public:
  virtual ~FingerprintRules() = default;
  virtual bool agree(const Fingerprint& a, const Fingerprint& b) const = 0;
  /// "all_reduce(SUM, float32, 1024 elements)".
  virtual std::string describe(const Fingerprint& call) const = 0;
};

}  // namespace muster::transport
