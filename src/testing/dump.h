// SPDX-License-Identifier: BSD-3-Clause
/// The memory that a core dump of a process would show.
#pragma once

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/descriptor.h"

namespace muster::testing {

/// A text that this process's memory does not hold as such.
struct HiddenText {
  explicit HiddenText(std::string text) : hidden(std::move(text)) {
    for (char& each : hidden) each = static_cast<char>(each ^ kMask);
  }
  bool stands_at(const char* at) const {
    for (std::size_t i = 0; i < hidden.size(); ++i)
      if (static_cast<char>(at[i] ^ kMask) != hidden[i]) return false;
    return true;
  }
  static constexpr char kMask = 0x5a;
  std::string hidden;
};

/// Shows `visit` what a core dump of `process` (a child, or this one) would hold: memory that
/// madvise has not excluded, in pieces that share `overlap` bytes with the next, until it returns
/// true. Returns how many bytes were shown. `writable`: no code and no constants.
template <class Visit>
std::size_t look_through_dump(pid_t process, std::size_t overlap, bool writable, Visit&& visit) {
  const std::string folder = "/proc/" + std::to_string(process);
  struct Range {
    unsigned long begin = 0, end = 0;
    bool wanted = false, excluded = false;
  };
  std::vector<Range> ranges;
  std::ifstream maps(folder + "/smaps");
  for (std::string line; std::getline(maps, line);) {
    Range range;
    std::array<char, 3> may{};
    if (std::sscanf(line.c_str(), "%lx-%lx %2c", &range.begin, &range.end, may.data()) == 3) {
      range.wanted = may[0] == 'r' && (!writable || may[1] == 'w');
      ranges.push_back(range);
    } else if (line.starts_with("VmFlags:") && !ranges.empty()) {
      ranges.back().excluded = line.find(" dd") != std::string::npos;
    }
  }
  const Descriptor memory(::open((folder + "/mem").c_str(), O_RDONLY | O_CLOEXEC));
  std::size_t shown = 0;
  constexpr std::size_t kPiece = std::size_t{1} << 16;
  std::string piece(kPiece + overlap, '\0');
  for (const Range& range : ranges) {
    if (!range.wanted || range.excluded) continue;
    for (unsigned long at = range.begin; at < range.end; at += kPiece) {
      const std::size_t most = std::min<std::size_t>(piece.size(), range.end - at);
      const ssize_t count = ::pread(memory.get(), piece.data(), most, static_cast<off_t>(at));
      if (count <= 0) break;
      shown += static_cast<std::size_t>(count);
      if (visit(std::string_view(piece).substr(0, static_cast<std::size_t>(count)))) return shown;
    }
  }
  return shown;
}

/// Whether a core dump of `process` would hold the text. `looked_at`: how many bytes were looked
/// at.
inline bool dump_shows(pid_t process, const HiddenText& text, std::size_t& looked_at) {
  bool found = false;
  looked_at = look_through_dump(process, text.hidden.size(), false, [&](std::string_view piece) {
    for (std::size_t i = 0; !found && i + text.hidden.size() <= piece.size(); ++i)
      found = text.stands_at(piece.data() + i);
    return found;
  });
  return found;
}

}  // namespace muster::testing
