/// Pieces of forwarding workers' output: whole prefixed lines, and the tail kept for the report.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

namespace muster::launch {

/// `text` with each ${name} replaced by its value; unknown names are left unchanged.
std::string expand_names(const std::string& text, const std::map<std::string, std::string>& names);

/// Splits a stream into lines and prefixes each. Memory is bounded: a line longer than the limit is
/// split.
class LinePrefixer {
 public:
  static constexpr std::size_t kMaxLineBytes = std::size_t{1} << 20;
  explicit LinePrefixer(std::string prefix) : prefix_(std::move(prefix)) {}

  /// Appends the complete lines to `out`, each with its newline. A carriage return (progress bars)
  /// also ends a line and is kept.
  void feed(std::string_view bytes, std::string& out);
  /// The stream has ended: the rest is output as a line.
  void finish(std::string& out);

 private:
  void emit(std::string_view line, std::string& out);
  std::string prefix_;
  std::string pending_;
};

/// The end of a stream: its last `kLines` lines within its last `kBytes` bytes.
class Tail {
 public:
  static constexpr std::size_t kBytes = 4096;
  static constexpr int kLines = 20;
  void feed(std::string_view bytes);
  /// Without the last newline. Begins at the start of a line unless the byte limit cut it.
  std::string text() const;

 private:
  std::string bytes_;
};

/// Whether both descriptors refer to the same file, pipe or terminal.
bool same_file(int one, int other);

}  // namespace muster::launch
