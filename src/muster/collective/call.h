/// One call, checked before anything is sent, and told to the other members in 32 bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "muster/base/status.h"
#include "muster/collective/communicator.h"
#include "muster/transport/fingerprint.h"

namespace muster::collective {

/// Whether the member at position `rank` of a group of `size` may make this call: the number of
/// slices, their lengths, overlaps, the root, the reduction; of a message its other end and its
/// tag. Code::invalid_argument or Code::unsupported, with what was expected and what came. What
/// only the root reads or writes is ignored elsewhere.
Status validate(const Args& args, int rank, int size);

/// What all members must agree on in this call; `args` are valid.
transport::Fingerprint fingerprint_of(const Args& args, std::uint64_t sequence);
/// What a member tells of a call that it could not make.
transport::Fingerprint refusal_of(Op op, std::uint64_t sequence);

/// What a call is, but for where its memory lies: calls of one group with the same signature
/// compare, and move, in the same way.
struct CallSignature {
  std::uint64_t kind = 0;  // operation, element type, reduction and root
  std::uint64_t each =
      Args::kUnsaid;  // unsaid: slices may be of any length, and the signature says nothing
  bool operator==(const CallSignature&) const = default;
};
inline CallSignature signature_of(const Args& args) {
  return {static_cast<std::uint64_t>(args.op) | static_cast<std::uint64_t>(args.dtype) << 8 |
              static_cast<std::uint64_t>(args.reduce) << 16 |
              std::uint64_t{static_cast<std::uint32_t>(args.root)} << 32,
          args.each};
}

/// What was found out about the calls of a group by their signatures: the same ones come again and
/// again. Of two that meet in a place the later one stays.
template <class Facts>
class CallCache {
 public:
  /// `find_out()` where they are not known. Good until the next call.
  template <class FindOut>
  const Facts& operator()(const CallSignature& signature, const FindOut& find_out) {
    if (signature.each == Args::kUnsaid) return unsaid_ = find_out();
    Entry& entry = entries_[place_of(signature)];
    if (entry.signature != signature) [[unlikely]] {
      entry.facts = find_out();
      entry.signature = signature;
    }
    return entry.facts;
  }

 private:
  static constexpr int kPlaceBits = 4;
  struct Entry {
    CallSignature signature;
    Facts facts;
  };
  static std::size_t place_of(const CallSignature& signature) {
    return static_cast<std::size_t>((signature.kind ^ signature.each << 20) * 0x9e3779b97f4a7c15u >>
                                    (64 - kPlaceBits));
  }

  std::array<Entry, std::size_t{1} << kPlaceBits> entries_{};
  Facts unsaid_{};
};

/// "ranks 1, 2 and 5", "rank 1".
std::string describe_ranks(const std::vector<int>& ranks);

}  // namespace muster::collective
