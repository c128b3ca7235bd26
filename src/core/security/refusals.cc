// SPDX-License-Identifier: BSD-3-Clause
#include "core/security/refusals.h"

namespace muster {
namespace {

constexpr Duration kBetweenLines = std::chrono::seconds(1);

}  // namespace

std::optional<std::string> RefusalCount::note(std::string_view sentence, TimePoint now) {
  const std::lock_guard lock(mutex_);
  ++count_;
  if (last_line_ && now < *last_line_ + kBetweenLines) {
    ++unlogged_;
    return std::nullopt;
  }
  std::string line(sentence);
  if (unlogged_ > 0)
    line +=
        " (and " + std::to_string(unlogged_) + " more that were turned away since the last line)";
  last_line_ = now;
  unlogged_ = 0;
  return line;
}

std::uint64_t RefusalCount::count() const {
  const std::lock_guard lock(mutex_);
  return count_;
}

}  // namespace muster
