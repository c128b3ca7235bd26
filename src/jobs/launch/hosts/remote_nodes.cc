// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/hosts/remote_nodes.h"

#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include "core/base/descriptor.h"
#include "core/base/log/log.h"
#include "core/base/log/queued_writer.h"
#include "core/base/process/shell_word.h"
#include "jobs/launch/workers/event_loop.h"
#include "jobs/launch/workers/worker_commands.h"
#include "jobs/launch/workers/worker_output.h"

namespace muster::launch {
namespace {

/// A connection that is silent for 30 s is lost. The nodes of a job notice it earlier when one of
/// them is silent.
constexpr const char* kAliveOptions[] = {"ServerAliveInterval=10", "ServerAliveCountMax=3"};

enum class RemoteSource : std::uint32_t { signals, timer, end, output };

std::uint64_t pack_remote(RemoteSource source, std::uint64_t index) {
  return static_cast<std::uint64_t>(source) << 32 | index;
}

/// ssh needs no secret of ours.
std::vector<std::string> environment_of_ssh() {
  Environment environment = inherited_environment();
  std::erase_if(environment,
                [](const auto& variable) { return variable.first.starts_with("MUSTER_SECRET"); });
  return flatten(environment);
}

/// Runs on one thread, which blocks only in `wait_and_dispatch`.
class RemoteJob {
 public:
  RemoteJob(const RemoteOptions& options, SignalWatch& signals)
      : options_(options), signals_(signals) {}
  /// The exit code.
  Result<int> run(const std::vector<RemoteNode>& nodes);

 private:
  /// How far the job's end has come.
  enum class Ending : std::uint8_t {
    none,
    by_itself,  // a node has failed; the others hear of it from it
    told,       // they were told to end
    cut,        // their ssh was killed
  };
  struct SshNode {
    std::string destination;
    pid_t pid = -1;
    Descriptor pidfd;                      // invalid once it has ended
    std::unique_ptr<QueuedWriter> stream;  // its standard input
    std::optional<ProcessExit> exit;
  };

  Status open();
  Status start(const RemoteNode& node);
  Status wait_and_dispatch();
  void show_all();
  void take_end(std::size_t index);
  void take_signal(int signal);
  void take_timer();
  void go_to(Ending ending);
  void pass(int signal);
  bool running() const {
    return std::any_of(nodes_.begin(), nodes_.end(),
                       [](const SshNode& node) { return static_cast<bool>(node.pidfd); });
  }
  int exit_code() const;
  std::string report() const;

  const RemoteOptions& options_;
  SignalWatch& signals_;
  std::string ssh_file_;
  std::vector<std::string> environment_ = environment_of_ssh();
  Wakeups wakeups_;
  std::unique_ptr<WorkerOutput> output_;
  std::vector<SshNode> nodes_;
  std::optional<std::size_t> first_failure_;
  bool failed_before_signal_ = false;
  int stop_signal_ = 0;   // the first
  int stop_signals_ = 0;  // how many
  Ending ending_ = Ending::none;
  std::optional<EndingGrace> grace_;
};

Status RemoteJob::open() {
  auto file = find_program(options_.ssh.front());
  if (!file) return file.status().with_context("--ssh names the one to use");
  ssh_file_ = *file;
  if (Status opened = wakeups_.open(pack_remote(RemoteSource::timer, 0)); !opened) return opened;
  wakeups_.watch(signals_.descriptor(), pack_remote(RemoteSource::signals, 0));
  OutputPlan plan;
  plan.line_prefix.clear();  // the launchers there have put theirs
  auto output = WorkerOutput::make(
      std::move(plan), EventSource{[this](int fd, std::uint64_t token) {
                                     wakeups_.watch(fd, pack_remote(RemoteSource::output, token));
                                   },
                                   [this](int fd) { wakeups_.forget(fd); }});
  if (!output) return output.status();
  output_ = std::move(*output);
  return {};
}

Status RemoteJob::start(const RemoteNode& node) {
  const int index = static_cast<int>(nodes_.size());
  auto ends = output_->open(index, index, 0);
  if (!ends) return ends.status();
  int stream[2];
  if (::pipe2(stream, O_CLOEXEC) != 0)
    return Status(Code::exhausted, "no pipe for ssh: " + errno_text(errno));
  const Descriptor read_end(stream[0]);
  Descriptor write_end(stream[1]);
  WorkerCommand command{.file = ssh_file_,
                        .arguments = ssh_words(options_, node.destination),
                        .environment = environment_,
                        .out = ends->out.get(),
                        .err = ends->err.get()};
  command.in = read_end.get();
  int exit_code = 0;
  auto started = start_worker(command, signals_.previous_mask(), &exit_code);
  if (!started) return started.status().with_context("starting ssh for " + node.destination);
  wakeups_.watch(started->pidfd.get(),
                 pack_remote(RemoteSource::end, static_cast<std::uint64_t>(index)));
  // An ssh that has gone takes no more; its end says why.
  auto writer = std::make_unique<QueuedWriter>(
      QueueOptions{.thread = "the thread that writes to ssh", .own = std::move(write_end)});
  std::string order = encode(node.order);
  writer->put(order);
  ::explicit_bzero(order.data(), order.size());
  nodes_.push_back(
      {node.destination, started->pid, std::move(started->pidfd), std::move(writer), {}});
  return {};
}

Result<int> RemoteJob::run(const std::vector<RemoteNode>& nodes) {
  if (Status opened = open(); !opened) return opened;
  Status started;
  for (std::size_t i = 0; i < nodes.size() && started; ++i) started = start(nodes[i]);
  if (!started) {
    output_->say(options_.command + ": " + started.message());
    go_to(Ending::told);
  }
  while (running()) {
    if (Status waited = wait_and_dispatch(); !waited) return waited;  // ssh ends with this process
  }
  output_->stop_waiting();
  show_all();
  if (!started) return 1;
  if (const std::string text = report(); !text.empty()) output_->say(text);
  show_all();
  return exit_code();
}

/// A reader that stands still is waited for, unless a signal asks to stop.
void RemoteJob::show_all() {
  const int signals = stop_signals_;
  while (!output_->drained() && stop_signals_ == signals) {
    if (!wait_and_dispatch()) break;
  }
}

Status RemoteJob::wait_and_dispatch() {
  epoll_event ready[64];
  const auto count = wakeups_.wait(ready);
  if (!count) return count.status();
  for (int i = 0; i < *count; ++i) {
    const std::uint64_t index = ready[i].data.u64 & 0xffffffff;
    switch (static_cast<RemoteSource>(ready[i].data.u64 >> 32)) {
      case RemoteSource::signals:
        for (const int signal : signals_.take()) take_signal(signal);
        break;
      case RemoteSource::timer: take_timer(); break;
      case RemoteSource::end: take_end(index); break;
      case RemoteSource::output: output_->ready(index); break;
    }
  }
  return {};
}

void RemoteJob::take_end(std::size_t index) {
  SshNode& node = nodes_[index];
  auto exit = reap(node.pid);
  if (exit && !*exit) return;  // it runs still
  wakeups_.forget(node.pidfd.get());
  node.pidfd.reset();
  node.stream.reset();
  node.exit = exit ? **exit : ProcessExit{.code = 255};
  if (node.exit->success() || first_failure_) return;
  first_failure_ = index;
  failed_before_signal_ = stop_signal_ == 0;
  // The others wait for a node that has not come, and hear nothing of it.
  const bool unknown = is_lost(*node.exit) || could_not_start(*node.exit);
  if (ending_ == Ending::none) go_to(unknown ? Ending::told : Ending::by_itself);
}

void RemoteJob::take_signal(int signal) {
  pass(signal);
  if (!options_.stop_signals.contains(signal)) return;
  if (stop_signal_ == 0) stop_signal_ = signal;
  // The launchers there take a second signal as `muster run` does. A third one waits for nothing.
  if (++stop_signals_ == 3) return go_to(Ending::cut);
  if (ending_ != Ending::told) go_to(Ending::told);
}

/// To the end that follows, and what belongs to it.
void RemoteJob::go_to(Ending ending) {
  if (ending_ == Ending::cut) return;
  ending_ = ending;
  if (ending == Ending::told && stop_signal_ == 0) pass(SIGTERM);
  if (ending == Ending::cut) {
    for (const SshNode& node : nodes_)
      if (node.pidfd) ::kill(node.pid, SIGKILL);
    wakeups_.arm_timer(TimePoint::max());
    return;
  }
  grace_.emplace(steady_clock(), options_.ending_timeout);
  wakeups_.arm_timer(grace_->deadline());
}

void RemoteJob::take_timer() {
  wakeups_.take_timer();
  if (!grace_ || ending_ == Ending::cut) return;
  if (!grace_->is_over()) return wakeups_.arm_timer(grace_->deadline());
  if (ending_ == Ending::by_itself) return go_to(Ending::told);
  for (const SshNode& node : nodes_) {
    if (node.pidfd)
      output_->say(options_.command + ": the node on " + node.destination +
                   " has not ended in time; its ssh is killed");
  }
  go_to(Ending::cut);
}

/// A node reads signals as bytes.
void RemoteJob::pass(int signal) {
  const char byte = static_cast<char>(signal);
  for (SshNode& node : nodes_)
    if (node.pidfd) node.stream->put({&byte, 1});
}

int RemoteJob::exit_code() const {
  if (stop_signal_ != 0) return 128 + stop_signal_;
  return first_failure_ ? nodes_[*first_failure_].exit->shell_code() : 0;
}

std::string RemoteJob::report() const {
  if (!failed_before_signal_) return {};
  const SshNode& node = nodes_[*first_failure_];
  const std::string head = options_.command + ": ";
  std::string text =
      head + "FAILED: the node on " + node.destination + ": ssh ended with " + describe(*node.exit);
  if (!is_lost(*node.exit)) {
    if (node.exit->code == 127)
      text += " (is there no " + options_.muster + "? --remote-muster names it)";
    return text + "\n" + head + "what the launcher there has said is above\n";
  }
  text += ": it could not connect or lost the connection, or the program ended with 255\n";
  const std::string tail = output_->tail(static_cast<int>(*first_failure_));
  if (tail.empty()) return text;
  text += head + "the last of its standard error:\n";
  std::istringstream lines(tail);
  for (std::string line; std::getline(lines, line);) text += "  | " + line + "\n";
  return text;
}

Result<int> try_remote_nodes(const RemoteOptions& options, const std::vector<RemoteNode>& nodes) {
  // The secret lies in queues and pipes here, which a core file would hold.
  rlimit core{};
  if (::getrlimit(RLIMIT_CORE, &core) == 0) {
    core.rlim_cur = 0;
    ::setrlimit(RLIMIT_CORE, &core);
  }
  auto signals = SignalWatch::open(options.stop_signals);
  if (!signals) return signals.status();
  return RemoteJob(options, *signals).run(nodes);
}

}  // namespace

std::vector<std::string> ssh_words(const RemoteOptions& options, const std::string& destination) {
  std::vector<std::string> words = options.ssh;
  // ssh takes the first value of an option, so those of the user go before ours. Nobody is there
  // to answer a question: ssh runs in the background of its terminal.
  const auto connect = std::chrono::ceil<std::chrono::seconds>(options.connect_timeout).count();
  words.insert(words.end(), {"-T", "-o", "BatchMode=yes", "-o",
                             "ConnectTimeout=" + std::to_string(std::max<long>(1, connect))});
  for (const char* const each : kAliveOptions) words.insert(words.end(), {"-o", each});
  words.insert(words.end(), {destination, "exec " + shell_word(options.muster) + " node"});
  return words;
}

int run_remote_nodes(const RemoteOptions& options, const std::vector<RemoteNode>& nodes) {
  log_by_thread();
  auto code = try_remote_nodes(options, nodes);
  if (code) return *code;
  std::cerr << options.command << ": " << code.status().message() << std::endl;
  return 1;
}

}  // namespace muster::launch
