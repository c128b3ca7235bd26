// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/worker_output.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "core/base/log/log.h"
#include "core/net/socket_address.h"
#include "core/security/own_files.h"
#include "core/tunables/tunables_fixed.h"

namespace muster::launch {

void LinePrefixer::emit(std::string_view line, std::string& out) {
  out.append(prefix_);
  out.append(pending_);
  out.append(line);
  pending_.clear();
}

std::string expand_names(const std::string& text, const std::map<std::string, std::string>& names) {
  std::string result;
  std::size_t from = 0;
  for (std::size_t at = text.find("${"); at != std::string::npos; at = text.find("${", from)) {
    const std::size_t close = text.find('}', at);
    if (close == std::string::npos) break;
    result += text.substr(from, at - from);
    const auto name = names.find(text.substr(at + 2, close - at - 2));
    result += name != names.end() ? name->second : text.substr(at, close + 1 - at);
    from = close + 1;
  }
  return result + text.substr(from);
}

void LinePrefixer::feed(std::string_view bytes, std::string& out) {
  while (!bytes.empty()) {
    // The previous piece ended with a carriage return. Only now is it known whether a newline
    // follows.
    if (!pending_.empty() && pending_.back() == '\r' && bytes.front() != '\n') emit({}, out);
    std::size_t end = bytes.find_first_of("\r\n");
    if (end != std::string_view::npos && bytes[end] == '\r') {
      if (end + 1 == bytes.size()) {
        end = std::string_view::npos;
      } else if (bytes[end + 1] == '\n') {
        ++end;
      }
    }
    const std::size_t room = kMaxLineBytes - std::min(kMaxLineBytes, pending_.size());
    const std::size_t length = end == std::string_view::npos ? bytes.size() : end + 1;
    if (length > room) {
      emit(bytes.substr(0, room), out);
      out.push_back('\n');
      bytes.remove_prefix(room);
    } else if (end == std::string_view::npos) {
      pending_.append(bytes);
      return;
    } else {
      emit(bytes.substr(0, length), out);
      bytes.remove_prefix(length);
    }
  }
}

void LinePrefixer::finish(std::string& out) {
  if (pending_.empty()) return;
  emit("\n", out);
}

void Tail::feed(std::string_view bytes) {
  if (bytes.size() >= kBytes) {
    bytes_ = bytes.substr(bytes.size() - kBytes);
    return;
  }
  bytes_.append(bytes);
  if (bytes_.size() > 4 * kBytes) bytes_.erase(0, bytes_.size() - kBytes);
}

std::string Tail::text() const {
  std::string_view text = bytes_;
  if (text.size() > kBytes) text.remove_prefix(text.size() - kBytes);
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
  std::size_t from = text.size();
  for (int lines = 0; lines < kLines && from != std::string_view::npos && from > 0; ++lines)
    from = text.rfind('\n', from - 1);
  if (from != std::string_view::npos && from < text.size() && text[from] == '\n')
    text.remove_prefix(from + 1);
  return std::string(text);
}

bool same_file(int one, int other) {
  struct stat a {
  }, b{};
  return ::fstat(one, &a) == 0 && ::fstat(other, &b) == 0 && a.st_dev == b.st_dev &&
         a.st_ino == b.st_ino;
}

namespace {

constexpr std::uint64_t kWrittenToken = 0;
constexpr std::uint64_t kFirstStream = 1;
// Bytes that wait for a writer: workers are paused from the one on, and go on from the other.
constexpr std::size_t kHighWater = std::size_t{256} << 10;  // limit: memory
constexpr std::size_t kLowWater = std::size_t{64} << 10;    // limit: memory
// How long a launcher that ends waits for log files: for the next bytes to be taken, and in all.
constexpr Duration kPatienceWithDisk = std::chrono::seconds(2);
constexpr Duration kPatienceAtEnd = std::chrono::seconds(10);

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

std::function<void(int)> note_refusal(std::string where) {
  return [where = std::move(where)](int error) {
    if (error == EPIPE) return;  // nobody wants to read it
    log(LogLevel::warning, "the workers' output cannot be written to " + where + ": " +
                               errno_text(error) + "; it is lost until that takes it again");
  };
}

}  // namespace

struct WorkerOutput::LogFile {
  LogFile(std::string where, QueueOptions options)
      : path(std::move(where)), writer(std::move(options)) {}
  std::string path;
  QueuedWriter writer;
};

struct WorkerOutput::Stream {
  int local_rank = 0;
  Streams which = Streams::out;
  std::uint64_t token = 0;
  Descriptor pipe;  // none: the worker writes to the file itself, or the stream has ended
  Descriptor file;  // that the worker writes
  std::string path;
  LogFile* log = nullptr;           // null: none that the launcher writes
  QueuedWriter* console = nullptr;  // null: not shown
  LinePrefixer lines{""};
  Tail tail;
  bool paused = false;
  std::optional<std::size_t> left;  // bytes still to be read after all workers have ended
};

WorkerOutput::WorkerOutput(OutputPlan plan, EventSource events, Descriptor written)
    : plan_(std::move(plan)),
      events_(std::move(events)),
      written_(std::make_shared<Descriptor>(std::move(written))) {
  events_.watch(written_->get(), kWrittenToken);
  add_console(1);
  if (!same_file(1, 2)) add_console(2);
}

Result<std::unique_ptr<WorkerOutput>> WorkerOutput::make(OutputPlan plan, EventSource events) {
  Descriptor written(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!written)
    return Status(Code::exhausted, "no descriptor for the workers' output: " + errno_text(errno));
  return std::unique_ptr<WorkerOutput>(
      new WorkerOutput(std::move(plan), std::move(events), std::move(written)));
}

WorkerOutput::~WorkerOutput() {
  const TimePoint end = deadline_after(steady_clock(), kPatienceAtEnd);
  for (auto& file : log_files_) {
    const Duration left = std::max(end - steady_clock().now(), Duration(0));
    file->writer.finish(std::min(kPatienceWithDisk, left), left);
    if (const std::size_t lost = file->writer.queued(); lost > 0)
      log(LogLevel::warning, std::to_string(lost) +
                                 " bytes of the workers' output were not written to " + file->path +
                                 ", which takes no more");
  }
}

/// For writers, whose threads may outlive this.
std::function<void()> WorkerOutput::wake_launcher() const {
  return [written = written_] {
    const std::uint64_t one = 1;
    // Refused only where the launcher has so much to read already.
    static_cast<void>(::write(written->get(), &one, sizeof one));
  };
}

void WorkerOutput::add_console(int fd) {
  consoles_.push_back(std::make_unique<QueuedWriter>(
      QueueOptions{.thread = "the thread that shows the workers' output",
                   .fd = fd,
                   .on_error = note_refusal(fd == 2 ? "standard error" : "standard output"),
                   .on_written = wake_launcher()}));
}

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
  stream.log = nullptr;
  stream.console =
      shown ? (which == Streams::out ? consoles_.front() : consoles_.back()).get() : nullptr;
  stream.lines = LinePrefixer(
      expand_names(plan_.line_prefix, {{"rank", rank < 0 ? "spare" : std::to_string(rank)},
                                       {"local_rank", std::to_string(local_rank)}}));
  if (!redirected && !teed) return {};
  std::vector<std::string> folders = plan_.log_folders;
  folders.insert(folders.end(), {"attempt_" + std::to_string(attempt), std::to_string(local_rank)});
  const std::string name = which == Streams::out ? "stdout.log" : "stderr.log";
  auto file = open_file(folders, name);
  if (!file) return file.status();
  stream.file = std::move(*file);
  stream.path = plan_.log_base;
  for (const std::string& each : folders) stream.path += "/" + each;
  stream.path += "/" + name;
  return {};
}

/// The stream has a pipe, so the launcher writes its log file.
void WorkerOutput::write_by_thread(Stream& stream) {
  if (!stream.file) return;
  QueueOptions options{.thread = "the thread that writes a log file",
                       .own = std::move(stream.file),
                       .on_written = wake_launcher()};
  options.on_error = note_refusal(stream.path);
  log_files_.push_back(std::make_unique<LogFile>(stream.path, std::move(options)));
  stream.log = log_files_.back().get();
}

/// The log of an earlier attempt is complete.
void WorkerOutput::let_go(int local_rank, Streams which) {
  for (auto& earlier : streams_) {
    if (earlier->local_rank != local_rank || earlier->which != which || earlier->pipe) continue;
    earlier->file.reset();
    if (earlier->log == nullptr || earlier->log->writer.queued() > 0) continue;
    std::erase_if(log_files_, [&](const auto& each) { return each.get() == earlier->log; });
    earlier->log = nullptr;
  }
}

Result<Descriptor> WorkerOutput::open_stream(int local_rank, int rank, int attempt, Streams which) {
  auto stream = std::make_unique<Stream>();
  stream->which = which;
  stream->token = kFirstStream + streams_.size();
  if (Status assigned = assign(*stream, local_rank, rank, attempt); !assigned) return assigned;
  Descriptor end;
  if (stream->file && stream->console == nullptr) {
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
    events_.watch(ends[0], stream->token);
    write_by_thread(*stream);
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
    write_by_thread(*stream);
  }
  pace_streams();  // one may have waited for a writer that it no longer has
  return {};
}

void WorkerOutput::ready(std::uint64_t token) {
  if (token != kWrittenToken) return read_some(*streams_[token - kFirstStream]);
  std::uint64_t times = 0;
  static_cast<void>(::read(written_->get(), &times, sizeof times));  // nothing: read already
  pace_streams();
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
  if (stream.log != nullptr) stream.log->writer.put(bytes);
  if (stream.console != nullptr) {
    std::string lines;
    stream.lines.feed(bytes, lines);
    stream.console->put(lines);
  }
  if (stream.left == std::size_t{0}) return close(stream);
  pace_streams();
}

void WorkerOutput::close(Stream& stream) {
  if (!stream.paused) events_.forget(stream.pipe.get());
  stream.pipe.reset();
  if (stream.console == nullptr) return;
  std::string rest;
  stream.lines.finish(rest);
  stream.console->put(rest);
}

/// Stops reading the streams whose writers are behind, and goes on with those that have caught up.
void WorkerOutput::pace_streams() {
  for (auto& stream : streams_) {
    if (!stream->pipe) continue;
    // The little that is left after all workers have ended waits for no log file.
    const bool by_log = stream->log != nullptr && !stream->left;
    const std::size_t queued = std::max(stream->console != nullptr ? stream->console->queued() : 0,
                                        by_log ? stream->log->writer.queued() : 0);
    const bool pause = queued > (stream->paused ? kLowWater : kHighWater);
    if (pause == stream->paused) continue;
    stream->paused = pause;
    if (pause) events_.forget(stream->pipe.get());
    if (!pause) events_.watch(stream->pipe.get(), stream->token);
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
  pace_streams();
}

bool WorkerOutput::drained() const {
  return std::all_of(streams_.begin(), streams_.end(),
                     [](const auto& stream) { return !stream->pipe; }) &&
         std::all_of(consoles_.begin(), consoles_.end(),
                     [](const auto& console) { return console->queued() == 0; });
}

void WorkerOutput::say(const std::string& text) {
  consoles_.back()->put(text.ends_with('\n') ? text : text + "\n");
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
