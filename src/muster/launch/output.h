/// Forwards workers' output to the console: whole prefixed lines, a bounded queue, and the tail
/// kept for the report.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

#include "muster/base/descriptor.h"

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

/// A descriptor to which the launcher writes without blocking: bytes are queued, and `pump` writes
/// what the reader accepts.
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
  /// The queue to which lines are appended.
  std::string& queue() { return queue_; }
  /// Writes until the queue is empty or the descriptor is full. If the reader has closed it, all
  /// output is dropped from then on; if it fails otherwise (no space), what is queued is, and the
  /// log says so.
  void pump();
  bool broken() const { return broken_; }

 private:
  void lose(int error);

  int fd_;
  bool pollable_ = true;
  bool broken_ = false;
  int error_ = 0;  // that was logged, until a write succeeds
  std::string queue_;
  std::size_t at_ = 0;
};

/// Writes all of it, blocking; for files. False on an error (errno says which).
bool write_all(int fd, std::string_view bytes);
/// Whether both descriptors refer to the same file, pipe or terminal.
bool same_file(int one, int other);

}  // namespace muster::launch
