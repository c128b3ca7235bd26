// SPDX-License-Identifier: BSD-3-Clause
/// The stack of a call: addresses are taken when it is made, and resolved to names when read.
#pragma once

#include <array>
#include <string>

namespace muster {

class CallStack {
 public:
  /// The stack of this thread, without the innermost `skip` frames of the caller's own.
  static CallStack here(int skip = 0);

  /// One frame a line, the innermost first: its function as C++ spells it, and the file with the
  /// offset, which addr2line understands. A function that no table of the file names (a stripped
  /// file, a hidden symbol) is shown by its place alone. Reads the files' symbol tables: slow.
  std::string text() const;

 private:
  static constexpr int kDeepest = 40;
  std::array<void*, kDeepest> frames_{};
  int first_ = 0;
  int end_ = 0;
};

}  // namespace muster
