/// What a core dump of a process would show.
#pragma once

#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "muster/base/descriptor.h"

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

/// Whether a core dump of `process` (a child, or this one) would hold the text: in memory that
/// madvise has not excluded. `looked_at`: how many bytes were looked at.
inline bool dump_shows(pid_t process, const HiddenText& text, std::size_t& looked_at) {
  const std::string folder = "/proc/" + std::to_string(process);
  struct Range {
    unsigned long begin = 0, end = 0;
    bool readable = false, excluded = false;
  };
  std::vector<Range> ranges;
  std::ifstream maps(folder + "/smaps");
  for (std::string line; std::getline(maps, line);) {
    Range range;
    char may_read = '-';
    if (std::sscanf(line.c_str(), "%lx-%lx %c", &range.begin, &range.end, &may_read) == 3) {
      range.readable = may_read == 'r';
      ranges.push_back(range);
    } else if (line.starts_with("VmFlags:") && !ranges.empty()) {
      ranges.back().excluded = line.find(" dd") != std::string::npos;
    }
  }
  const Descriptor memory(::open((folder + "/mem").c_str(), O_RDONLY | O_CLOEXEC));
  looked_at = 0;
  constexpr std::size_t kPiece = std::size_t{1} << 16;
  std::string piece(kPiece + text.hidden.size(), '\0');
  for (const Range& range : ranges) {
    if (!range.readable || range.excluded) continue;
    for (unsigned long at = range.begin; at < range.end; at += kPiece) {
      const std::size_t most = std::min<std::size_t>(piece.size(), range.end - at);
      const ssize_t count = ::pread(memory.get(), piece.data(), most, static_cast<off_t>(at));
      if (count < static_cast<ssize_t>(text.hidden.size())) break;
      looked_at += static_cast<std::size_t>(count);
      for (std::size_t i = 0; i + text.hidden.size() <= static_cast<std::size_t>(count); ++i)
        if (text.stands_at(piece.data() + i)) return true;
    }
  }
  return false;
}

}  // namespace muster::testing
