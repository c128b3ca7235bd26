// SPDX-License-Identifier: BSD-3-Clause
/// Validation of a call before anything is sent, and its 32-byte fingerprint for the other members.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/collective/communicator.h"
#include "core/transport/channel/fingerprint.h"
#include "muster/status.h"

namespace muster::collective {

/// Whether the member at position `rank` of a group of `size` may make this call. Checks the number
/// of slices, their lengths and overlaps, the root and the reduction; for a message, its peer and
/// tag. Code::invalid_argument or Code::unsupported, with what was expected and what was passed.
/// Slices that only the root reads or writes are ignored on other members.
Status validate(const Args& args, int rank, int size);

/// The properties of this call that all members must agree on; `args` must be valid. A collective's
/// tag is one of them: a caller marks calls with it that differ in nothing else, such as those of
/// two units of FSDP.
transport::Fingerprint fingerprint_of(const Args& args, std::uint64_t sequence);
/// The fingerprint of a call that a member could not make.
transport::Fingerprint refusal_of(Op op, std::uint64_t sequence);

/// Everything about a call except its addresses. Calls of one group with the same signature compare
/// and move data in the same way.
struct CallSignature {
  std::uint64_t kind = 0;  // operation, element type, reduction and root
  std::uint64_t tag = 0;
  std::uint64_t each =
      Args::kUnknownLength;  // unsaid: slices of any length; such calls are not cached
  bool operator==(const CallSignature&) const = default;
};
inline CallSignature signature_of(const Args& args) {
  const bool whole = args.part_of.flags == 0;  // parts are not cached
  return {static_cast<std::uint64_t>(args.op) | static_cast<std::uint64_t>(args.dtype) << 8 |
              static_cast<std::uint64_t>(args.reduce) << 16 |
              std::uint64_t{static_cast<std::uint32_t>(args.root)} << 32,
          args.tag, whole ? args.each : Args::kUnknownLength};
}

/// Caches what was computed for calls of a group, by signature: programs repeat the same calls. On
/// a collision the later entry replaces the earlier one.
template <class Facts>
class CallCache {
 public:
  /// Computes the value with `find_out()` on a miss. The reference is valid until the next call.
  template <class FindOut>
  const Facts& operator()(const CallSignature& signature, const FindOut& find_out) {
    if (signature.each == Args::kUnknownLength) return uncached_ = find_out();
    CacheEntry& entry = entries_[place_of(signature)];
    if (entry.signature != signature) [[unlikely]] {
      entry.facts = find_out();
      entry.signature = signature;
    }
    return entry.facts;
  }

 private:
  static constexpr int kPlaceBits = 4;
  struct CacheEntry {
    CallSignature signature;
    Facts facts;
  };
  static std::size_t place_of(const CallSignature& signature) {
    return static_cast<std::size_t>((signature.kind ^ signature.each << 20 ^ signature.tag << 8) *
                                        0x9e3779b97f4a7c15u >>
                                    (64 - kPlaceBits));
  }

  std::array<CacheEntry, std::size_t{1} << kPlaceBits> entries_{};
  Facts uncached_{};
};

/// For example "ranks 1, 2 and 5" or "rank 1".
std::string describe_ranks(const std::vector<int>& ranks);

/// The collectives of a group of one: copies from inputs to outputs. `args`: a valid call of a
/// group with one member.
void run_single_rank(const Args& args);

}  // namespace muster::collective
