// SPDX-License-Identifier: BSD-3-Clause
/// All workers' output: pipes and files in, two console sinks out, with backpressure in between.
///
/// A stream is prefixed with `[rank]` and shown, written to a log file, both, or dropped. If it
/// goes to a file only, the worker writes the file itself. Threads write to the console and to log
/// files (`core/base/log/queued_writer.h`), so the launcher waits for no reader and no disk. While
/// one is slow, nothing is read from the workers that write to it: they block and memory stays
/// bounded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/log/queued_writer.h"
#include "jobs/launch/options.h"
#include "muster/status.h"

namespace muster::launch {

/// `text` with each ${name} replaced by its value; unknown names are left unchanged.
std::string expand_names(const std::string& text, const std::map<std::string, std::string>& names);

/// Splits a stream into lines and prefixes each. Memory is bounded: a line longer than the limit is
/// split.
class LinePrefixer {
 public:
  static constexpr std::size_t kMaxLineBytes = std::size_t{1} << 20;  // limit: memory
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

/// The event loop's interface; it passes `token` back to `WorkerOutput::ready`.
struct EventSource {
  std::function<void(int fd, std::uint64_t token)> watch;  ///< until `fd` is readable
  std::function<void(int fd)> forget;
};

struct OutputPlan {
  std::vector<Streams> redirects, tee;
  std::optional<std::set<int>> shown_ranks;
  std::string log_base;  ///< the folder that the user named; empty if nothing is redirected
  std::vector<std::string> log_folders{};  ///< below it: of this job on this node
  std::string line_prefix = "[${rank}] ";  ///< with ${rank} and ${local_rank}
};

class WorkerOutput {
 public:
  /// Tokens given to `events` start at 0 and are dense.
  static Result<std::unique_ptr<WorkerOutput>> make(OutputPlan plan, EventSource events);
  /// Waits for log files, but at most two seconds for the next bytes to be taken, and ten in all.
  /// The log says what they did not take.
  ~WorkerOutput();

  /// The write ends for a worker that is about to start. Its earlier streams, if any, continue to
  /// drain.
  struct Ends {
    Descriptor out, err;
  };
  Result<Ends> open(int local_rank, int rank, int attempt);  ///< rank -1: a spare

  /// The streams opened as those of `from` are another worker's from now on: its log files are
  /// opened, and what comes is shown as its.
  Status rename(int from, int local_rank, int rank, int attempt);

  /// Sets the folder below `log_base` for the log files of workers that start from now on.
  void set_log_folders(std::vector<std::string> folders) { plan_.log_folders = std::move(folders); }
  /// A watched descriptor is ready.
  void ready(std::uint64_t token);
  /// All workers have ended: shows what their pipes hold now, without waiting for their children.
  void stop_waiting();
  /// All received output has been written to the console, or was refused by it.
  bool drained() const;
  /// Writes a message of the launcher to standard error, as whole lines.
  void say(const std::string& text);
  /// The tail of a worker's standard error.
  std::string tail(int local_rank) const;

 private:
  struct Stream;
  struct LogFile;
  WorkerOutput(OutputPlan plan, EventSource events, Descriptor written);
  Result<Descriptor> open_stream(int local_rank, int rank, int attempt, Streams which);
  /// Whose it is: where it is shown, and its log file.
  Status assign(Stream& stream, int local_rank, int rank, int attempt);
  void let_go(int local_rank, Streams which);
  std::function<void()> wake_launcher() const;
  void add_console(int fd);
  void write_by_thread(Stream& stream);
  Result<Descriptor> open_file(const std::vector<std::string>& folders, const std::string& name);
  void read_some(Stream& stream);
  void close(Stream& stream);
  void pace_streams();

  OutputPlan plan_;
  EventSource events_;
  std::shared_ptr<Descriptor> written_;  // an eventfd that the writers' threads signal
  // Standard output and standard error; a single one if both are the same file.
  std::vector<std::unique_ptr<QueuedWriter>> consoles_;
  std::vector<std::unique_ptr<LogFile>> log_files_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

}  // namespace muster::launch
