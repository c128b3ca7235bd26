#include "jobs/launch/workers/signal_watch.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>

#include "core/base/errno_text.h"

namespace muster::launch {
namespace {

bool is_ignored(int signal) {
  struct sigaction action {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

Result<SignalWatch> SignalWatch::open(std::set<int> signals) {
  signals.insert({SIGUSR1, SIGUSR2});
  sigset_t taken;
  sigemptyset(&taken);
  for (int signal : signals) {
    if (signal != SIGHUP || !is_ignored(signal)) sigaddset(&taken, signal);
  }
  SignalWatch watch;
  watch.descriptor_.reset(::signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!watch.descriptor_)
    return Status(Code::exhausted, "no signal descriptor: " + errno_text(errno));
  ::pthread_sigmask(SIG_BLOCK, &taken, &watch.previous_);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &watch.previous_pipe_);
  return watch;
}

SignalWatch::~SignalWatch() {
  if (!descriptor_) return;
  ::sigaction(SIGPIPE, &previous_pipe_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
}

std::vector<int> SignalWatch::take() {
  std::vector<int> signals;
  signalfd_siginfo info{};
  while (::read(descriptor_.get(), &info, sizeof info) == sizeof info)
    signals.push_back(static_cast<int>(info.ssi_signo));
  return signals;
}

}  // namespace muster::launch
