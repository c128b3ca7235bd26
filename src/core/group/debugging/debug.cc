#include "muster/debug.h"

#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <mutex>
#include <utility>

#include "core/base/log/log.h"
#include "core/group/call/call.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/job.h"
#include "core/group/resolve.h"
#include "core/group/world.h"

namespace muster {
namespace {

/// Stops the calling process for a debugger.
void stop_for_debugger() {
  std::ifstream status("/proc/self/status");
  bool traced = false;
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("TracerPid:"))
      traced = line.find_first_of("123456789") != std::string::npos;
  if (traced) {
    ::raise(SIGTRAP);
    return;
  }
  const auto process = std::to_string(::getpid());
  log(LogLevel::error, "breakpoint: process " + process + " stops here; attach with gdb -p " +
                           process + " or lldb -p " + process +
                           ", or let it go on with kill -CONT " + process);
  ::raise(SIGSTOP);
}

std::mutex hook_mutex;
std::function<void()>& hook() {
  static auto& current = *new std::function<void()>(stop_for_debugger);
  return current;
}

/// A barrier without a timeout.
void barrier_without_timeout(const Group& world) {
  Call call(*world, Op::barrier, "breakpoint", Duration(-1));
  core_of(world).submit(call);
}

}  // namespace

void set_debug_level_from_env() { set_debug_level(group::take(debug_level_from_environment())); }

std::function<void()> set_breakpoint_hook(std::function<void()> wanted) {
  const std::lock_guard lock(hook_mutex);
  return std::exchange(hook(), std::move(wanted));
}

void breakpoint(int rank) {
  const auto scope = World::hold_current();
  const auto world = scope->world("breakpoint");
  const auto job = scope->job("breakpoint");
  world->global_rank_of(rank);  // throws if there is no such rank
  struct Suspended {
    explicit Suspended(transport::Fabric& fabric) : fabric(fabric) {
      fabric.suspend_heartbeats(true);
    }
    ~Suspended() { fabric.suspend_heartbeats(false); }
    transport::Fabric& fabric;
  };
  const Suspended suspended(*job->fabric);
  barrier_without_timeout(world);  // from here on no rank is declared dead for silence
  std::exception_ptr thrown;
  if (world->rank() == rank) {
    std::function<void()> stop;
    {
      const std::lock_guard lock(hook_mutex);
      stop = hook();
    }
    try {
      if (stop) stop();
    } catch (...) {
      thrown = std::current_exception();
    }
  }
  barrier_without_timeout(world);
  if (thrown) std::rethrow_exception(thrown);
}

void set_timeout(Duration timeout, const Group& group) {
  if (const auto which = group::acting(group, "set_timeout")) which->set_timeout(timeout);
}

void abort_process_group(const Group& group, const std::string& reason) {
  if (const auto which = group::acting(group, "abort_process_group")) core_of(which).abort(reason);
}

}  // namespace muster
