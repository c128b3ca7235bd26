/// All workers' output: pipes and files in, two console sinks out, with backpressure in between.
///
/// A stream is prefixed with `[rank]` and shown, written to a log file, both, or dropped. If it
/// goes to a file only, the worker writes the file itself. While the console is slow, nothing is
/// read from the workers: they block and memory stays bounded.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/descriptor.h"
#include "muster/launch/options.h"
#include "muster/launch/output.h"
#include "muster/status.h"

namespace muster::launch {

/// The event loop's interface; it passes `token` back to `WorkerOutput::ready`.
struct EventSource {
  std::function<void(int fd, bool writable, std::uint64_t token)> watch;
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
  WorkerOutput(OutputPlan plan, EventSource events);
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
  /// All received output has been written to the console.
  bool drained() const;
  /// Writes a message of the launcher to standard error, as whole lines.
  void say(const std::string& text);
  /// The tail of a worker's standard error.
  std::string tail(int local_rank) const;

 private:
  struct Stream;
  struct Sink;
  Result<Descriptor> open_stream(int local_rank, int rank, int attempt, Streams which);
  /// Whose it is: where it is shown, and its log file.
  Status assign(Stream& stream, int local_rank, int rank, int attempt);
  void let_go(int local_rank, Streams which);
  Result<Descriptor> open_file(const std::vector<std::string>& folders, const std::string& name);
  void read_some(Stream& stream);
  void close(Stream& stream);
  void settle(Sink& sink);

  OutputPlan plan_;
  EventSource events_;
  std::vector<std::unique_ptr<Sink>>
      sinks_;  // stdout, stderr; a single one if both are the same file
  std::vector<std::unique_ptr<Stream>> streams_;
};

}  // namespace muster::launch
