// SPDX-License-Identifier: BSD-3-Clause
/// How a group's messages share the tags of its MPI communicator.
#pragma once

#include <cstdint>

namespace muster::carried {

/// A third of the tags carries users' messages, a third the payloads of large ones, a third the
/// messages of reductions. The same on every member.
class CarriedTags {
 public:
  /// `last`: the largest that MPI has, at least 32767; or 0 for a library without messages.
  explicit CarriedTags(std::int64_t last) : third_(static_cast<std::uint64_t>(last) / 3) {}

  bool any() const { return third_ > 0; }
  bool carries(std::uint64_t user_tag) const { return user_tag < third_; }
  int payload(std::uint64_t number) const { return static_cast<int>(third_ + number % third_); }
  /// This tag and the two next ones are for call number `sequence`.
  int reduction(std::uint64_t sequence) const {
    return static_cast<int>(2 * third_ + 3 * (sequence % (third_ / 3)));
  }

 private:
  std::uint64_t third_;
};

}  // namespace muster::carried
