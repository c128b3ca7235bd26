/// Workers' output on its way to the console: prefixed whole lines, a bounded queue, the last words
/// kept.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

#include "muster/base/descriptor.h"

namespace muster::launch {

/// `text` with each ${name} replaced by its value; names that are not there stay as they are.
std::string expand_names(const std::string& text, const std::map<std::string, std::string>& names);

/// Cuts a stream into lines and puts a prefix before each. Memory is bounded: a longer line is cut
/// into several.
class LinePrefixer {
 public:
  static constexpr std::size_t kMaxLineBytes = std::size_t{1} << 20;
  explicit LinePrefixer(std::string prefix) : prefix_(std::move(prefix)) {}

  /// Appends the lines that are complete now to `out`, each with its newline. A carriage return
  /// ends a line too (progress bars) and stays in it.
  void feed(std::string_view bytes, std::string& out);
  /// The stream has ended: what is left comes out as a line.
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
  /// Without the last newline; begins at a line's start, or where the limit cut.
  std::string text() const;

 private:
  std::string bytes_;
};

/// One descriptor that the launcher writes to without ever blocking: bytes queue here, `pump`
/// writes what the reader takes now.
class ConsoleSink {
 public:
  static constexpr std::size_t kHighWater = std::size_t{256} << 10;
  static constexpr std::size_t kLowWater = std::size_t{64} << 10;
  /// The descriptor is not owned and its flags are left alone: others share them.
  explicit ConsoleSink(int fd);

  int fd() const { return fd_; }
  /// False for regular files and the like, which are always writable and unknown to epoll.
  bool pollable() const { return pollable_; }
  bool empty() const { return at_ == queue_.size(); }
  std::size_t queued() const { return queue_.size() - at_; }
  /// Where the lines go that are to be written.
  std::string& queue() { return queue_; }
  /// Writes until the queue is empty or the reader is slow. Where the reader has gone, all is
  /// dropped from then on.
  void pump();
  bool broken() const { return broken_; }

 private:
  int fd_;
  bool pollable_ = true;
  bool broken_ = false;
  std::string queue_;
  std::size_t at_ = 0;
};

/// Writes all of it, blocking; for files. False on an error (errno says which).
bool write_all(int fd, std::string_view bytes);
/// The same file, pipe or terminal behind both.
bool same_file(int one, int other);

}  // namespace muster::launch
