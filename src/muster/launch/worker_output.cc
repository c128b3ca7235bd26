#include "muster/launch/worker_output.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "muster/base/own_files.h"
#include "muster/base/socket_address.h"
#include "muster/base/tunables_fixed.h"

namespace muster::launch {
namespace {

constexpr std::uint64_t kSinkTokens = 2;

Streams streams_of(const std::vector<Streams>& list, int local_rank) {
  const auto at = static_cast<std::size_t>(local_rank);
  return at < list.size() ? list[at] : Streams::none;
}

std::string last_bytes_of(int fd, std::size_t count) {
  struct stat file {};
  if (::fstat(fd, &file) != 0 || file.st_size <= 0) return {};
  const off_t size = file.st_size;
  std::string text(std::min(count, static_cast<std::size_t>(size)), '\0');
  const ssize_t got = ::pread(fd, text.data(), text.size(), size - static_cast<off_t>(text.size()));
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

}  // namespace

struct WorkerOutput::Sink {
  ConsoleSink console;
  std::uint64_t token;
  bool watched = false;
};

struct WorkerOutput::Stream {
  int local_rank = 0;
  Streams which = Streams::out;
  std::uint64_t token = 0;
  Descriptor pipe;  // none: the worker writes to the file itself, or the stream has ended
  Descriptor file;
  Sink* sink = nullptr;  // null: not shown
  LinePrefixer lines{""};
  Tail tail;
  bool paused = false;
  std::optional<std::size_t> left;  // bytes still to be read after all workers have ended
};

WorkerOutput::WorkerOutput(OutputPlan plan, EventSource events)
    : plan_(std::move(plan)), events_(std::move(events)) {
  sinks_.push_back(std::make_unique<Sink>(Sink{ConsoleSink(1), 0}));
  if (!same_file(1, 2)) sinks_.push_back(std::make_unique<Sink>(Sink{ConsoleSink(2), 1}));
}

WorkerOutput::~WorkerOutput() = default;

Result<WorkerOutput::Ends> WorkerOutput::open(int local_rank, int rank, int attempt) {
  auto out = open_stream(local_rank, rank, attempt, Streams::out);
  if (!out) return out.status();
  auto err = open_stream(local_rank, rank, attempt, Streams::err);
  if (!err) return err.status();
  return Ends{std::move(*out), std::move(*err)};
}

/// Below the user's folder, files must be writable by this user only: another user may have created
/// them.
Result<Descriptor> WorkerOutput::open_file(const std::vector<std::string>& folders,
                                           const std::string& name) {
  const OwnRules rules{.name = "the folder of logs"};
  std::error_code error;
  std::filesystem::create_directories(plan_.log_base, error);
  Descriptor folder(::open(plan_.log_base.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder)
    return Status(Code::invalid_argument,
                  "cannot open the folder of logs " + plan_.log_base + ": " + errno_text(errno));
  std::string path = plan_.log_base;
  for (const std::string& each : folders) {
    auto next = make_own_folder(each, rules, 0750, folder.get());
    if (!next) return next.status().with_context("in " + path);
    folder = std::move(*next);
    path += "/" + each;
  }
  auto file = open_own_file(name, O_CREAT | O_TRUNC | O_RDWR | O_APPEND, {.name = "the log file"},
                            0640, folder.get());
  return file ? std::move(file) : Result<Descriptor>(file.status().with_context("in " + path));
}

Status WorkerOutput::assign(Stream& stream, int local_rank, int rank, int attempt) {
  const Streams which = stream.which;
  const bool redirected = covers(streams_of(plan_.redirects, local_rank), which);
  const bool teed = covers(streams_of(plan_.tee, local_rank), which);
  const bool shown =
      (!redirected || teed) && (!plan_.shown_ranks || plan_.shown_ranks->contains(local_rank));
  stream.local_rank = local_rank;
  stream.sink = shown ? (which == Streams::out ? sinks_.front() : sinks_.back()).get() : nullptr;
  stream.lines = LinePrefixer(
      expand_names(plan_.line_prefix, {{"rank", rank < 0 ? "spare" : std::to_string(rank)},
                                       {"local_rank", std::to_string(local_rank)}}));
  if (!redirected && !teed) return {};
  std::vector<std::string> folders = plan_.log_folders;
  folders.insert(folders.end(), {"attempt_" + std::to_string(attempt), std::to_string(local_rank)});
  auto file = open_file(folders, which == Streams::out ? "stdout.log" : "stderr.log");
  if (!file) return file.status();
  stream.file = std::move(*file);
  return {};
}

/// The log of an earlier attempt is complete.
void WorkerOutput::let_go(int local_rank, Streams which) {
  for (auto& earlier : streams_) {
    if (earlier->local_rank == local_rank && earlier->which == which && !earlier->pipe)
      earlier->file.reset();
  }
}

Result<Descriptor> WorkerOutput::open_stream(int local_rank, int rank, int attempt, Streams which) {
  auto stream = std::make_unique<Stream>();
  stream->which = which;
  stream->token = kSinkTokens + streams_.size();
  if (Status assigned = assign(*stream, local_rank, rank, attempt); !assigned) return assigned;
  Descriptor end;
  if (stream->file && stream->sink == nullptr) {
    end.reset(::fcntl(stream->file.get(), F_DUPFD_CLOEXEC, 3));
    if (!end)
      return Status(Code::exhausted,
                    "no file descriptor is left for a worker's log: " + errno_text(errno));
  } else {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0)
      return Status(Code::exhausted, "no pipe for a worker's output: " + errno_text(errno));
    stream->pipe.reset(ends[0]);
    end.reset(ends[1]);
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);  // cannot fail on a pipe that is open
    events_.watch(ends[0], false, stream->token);
  }
  let_go(local_rank, which);
  streams_.push_back(std::move(stream));
  return end;
}

Status WorkerOutput::rename(int from, int local_rank, int rank, int attempt) {
  for (auto& stream : streams_) {
    if (stream->local_rank != from || !stream->pipe) continue;
    let_go(local_rank, stream->which);
    if (Status assigned = assign(*stream, local_rank, rank, attempt); !assigned) return assigned;
    // It waited for a sink that it no longer has, which would not wake it.
    if (stream->paused && stream->sink == nullptr) {
      stream->paused = false;
      events_.watch(stream->pipe.get(), false, stream->token);
    }
  }
  return {};
}

void WorkerOutput::ready(std::uint64_t token) {
  if (token >= kSinkTokens) return read_some(*streams_[token - kSinkTokens]);
  for (auto& sink : sinks_) {
    if (sink->token == token) settle(*sink);
  }
}

void WorkerOutput::read_some(Stream& stream) {
  if (!stream.pipe || stream.paused) return;
  char buffer[fixed::kIoBuffer];
  const std::size_t wanted = std::min(fixed::kIoBuffer, stream.left.value_or(fixed::kIoBuffer));
  const ssize_t got = wanted == 0 ? 0 : ::read(stream.pipe.get(), buffer, wanted);
  if (got < 0 && (errno == EAGAIN || errno == EINTR) && !stream.left) return;
  if (got <= 0) return close(stream);
  const std::string_view bytes(buffer, static_cast<std::size_t>(got));
  if (stream.left) *stream.left -= bytes.size();
  stream.tail.feed(bytes);
  if (stream.file && !write_all(stream.file.get(), bytes)) {
    const int error = errno;
    stream.file.reset();
    say("a log file of local rank " + std::to_string(stream.local_rank) +
        " cannot be written any more: " + errno_text(error));
  }
  if (stream.sink != nullptr) {
    stream.lines.feed(bytes, stream.sink->console.queue());
    settle(*stream.sink);
  }
  if (stream.left == std::size_t{0}) close(stream);
}

void WorkerOutput::close(Stream& stream) {
  if (!stream.paused) events_.forget(stream.pipe.get());
  stream.pipe.reset();
  if (stream.sink == nullptr) return;
  stream.lines.finish(stream.sink->console.queue());
  settle(*stream.sink);
}

// Writes what the console accepts, then starts or stops polling it and the streams that feed it.
void WorkerOutput::settle(Sink& sink) {
  sink.console.pump();
  const bool wanted = !sink.console.empty();
  if (wanted != sink.watched) {
    if (wanted) events_.watch(sink.console.fd(), true, sink.token);
    if (!wanted) events_.forget(sink.console.fd());
    sink.watched = wanted;
  }
  const bool full = sink.console.queued() >= ConsoleSink::kHighWater;
  if (!full && sink.console.queued() > ConsoleSink::kLowWater) return;
  for (auto& stream : streams_) {
    if (stream->sink != &sink || !stream->pipe || stream->paused == full) continue;
    stream->paused = full;
    if (full) events_.forget(stream->pipe.get());
    if (!full) events_.watch(stream->pipe.get(), false, stream->token);
  }
}

void WorkerOutput::stop_waiting() {
  for (auto& stream : streams_) {
    if (!stream->pipe || stream->left) continue;
    int held = 0;
    if (::ioctl(stream->pipe.get(), FIONREAD, &held) != 0) held = 0;
    stream->left = static_cast<std::size_t>(held);
    // An empty pipe that a grandchild holds open would never become readable.
    if (held == 0) close(*stream);
  }
}

bool WorkerOutput::drained() const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const auto& stream) { return !stream->pipe; }) &&
         std::all_of(sinks_.begin(), sinks_.end(),
                     [](const auto& sink) { return sink->console.empty(); });
}

void WorkerOutput::say(const std::string& text) {
  sinks_.back()->console.queue().append(text).append(text.ends_with('\n') ? "" : "\n");
  settle(*sinks_.back());
}

std::string WorkerOutput::tail(int local_rank) const {
  for (auto stream = streams_.rbegin(); stream != streams_.rend(); ++stream) {
    if ((*stream)->local_rank != local_rank || (*stream)->which != Streams::err) continue;
    Tail tail = (*stream)->tail;
    if ((*stream)->file) {
      tail = Tail();
      tail.feed(last_bytes_of((*stream)->file.get(), Tail::kBytes));
    }
    return tail.text();
  }
  return {};
}

}  // namespace muster::launch
