// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/debugging/debug_detail.h"

#include <ATen/core/ivalue.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <mutex>
#include <utility>

#include "core/base/log/call_stack.h"
#include "core/base/log/log.h"
#include "core/group/call/call.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/job.h"
#include "core/group/resolve.h"
#include "core/group/world.h"
#include "core/wait/callbacks.h"
#include "muster/debug.h"

namespace muster::group {
namespace {

constexpr Duration kPeerSidesTimeout = std::chrono::seconds(2);
constexpr std::size_t kMaxRanksShown = 8;  // limit of ranks shown

/// One member's call, as published to the others.
struct CallSide {
  std::string call;    // "all_reduce"
  std::string shapes;  // "10", "2, 3; 4"
  std::string caller;  // as reported by the language binding
  CallStack stack;     // shown if `caller` is empty

  std::string called_from() const { return caller.empty() ? stack.text() : caller; }
};

std::function<std::string()>& caller_stack() {
  static auto* const caller = new std::function<std::string()>;
  return *caller;
}

std::string shapes_of(Call& call) {
  call.hold();
  std::string out;
  for (const auto& slice : call.inputs().empty() ? call.outputs() : call.inputs()) {
    for (const auto& tensor : slice) {
      if (!out.empty()) out += "; ";
      std::string dimensions;
      for (const auto length : tensor.sizes())
        dimensions += (dimensions.empty() ? "" : ", ") + std::to_string(length);
      out += dimensions.empty() ? "()" : dimensions;
    }
  }
  return out.empty() ? "none" : out;
}

/// torch's spelling in its reports: ALLREDUCE.
std::string torch_spelling(std::string_view name) {
  std::string out;
  for (const char c : name)
    if (c != '_') out += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return out;
}

class MismatchReport {
 public:
  MismatchReport(const ProcessGroup& group, Call& call)
      : me_(core_of(group).first_rank_of(group.rank())),
        members_(core_of(group).parts().first_ranks),
        store_(core_of(group).parts().store),
        key_("detail/" + group.name() + "/"),
        side_{std::string(call.name()), shapes_of(call),
              caller_stack() ? caller_stack()() : std::string(), CallStack::here(2)} {}

  [[noreturn]] void report(const DistError& error) const {
    std::string text = error.what();
    std::vector<int> others;
    for (const int rank : error.ranks())
      if (rank != me_) others.push_back(rank);
    if (others.empty())
      std::copy_if(members_.begin(), members_.end(), std::back_inserter(others),
                   [&](int rank) { return rank != me_; });
    if (others.size() > kMaxRanksShown) others.resize(kMaxRanksShown);
    const auto mine =
        side_.call + " with shapes " + side_.shapes + ", called from\n" + side_.called_from();
    if (error.code() == Code::timed_out) {
      throw DistBackendError(text + "\nRanks stuck before the collective " +
                                 torch_spelling(side_.call) + ": " + listed(error.ranks()) +
                                 "\nRank " + std::to_string(me_) + ": " + mine,
                             error.code(), error.ranks());
    }
    const auto sides = peer_sides(others, mine);
    const bool same_call = std::all_of(sides.begin(), sides.end(), [&](const auto& side) {
      return side.starts_with(side_.call + " with");
    });
    if (same_call && !sides.empty()) {
      text += "\nError when verifying shape tensors for collective " + torch_spelling(side_.call) +
              " on rank " + std::to_string(me_) +
              ". This likely indicates that input shapes into the collective are mismatched across "
              "ranks. Got shapes: " +
              side_.shapes;
    }
    text += "\nRank " + std::to_string(me_) + ": " + mine;
    for (std::size_t i = 0; i < sides.size(); ++i)
      text += "\nRank " + std::to_string(others[i]) + ": " +
              (sides[i].empty() ? "has not told what it called" : sides[i]);
    throw DistBackendError(text, error.code(), error.ranks());
  }

 private:
  static std::string listed(const std::vector<int>& ranks) {
    std::string out;
    for (const int rank : ranks) out += (out.empty() ? "" : ", ") + std::to_string(rank);
    return out.empty() ? "unknown" : out;
  }

  /// Publishes this rank's side and waits for the other ranks' sides; empty for those not published
  /// in time.
  std::vector<std::string> peer_sides(const std::vector<int>& others,
                                      const std::string& mine) const {
    const auto store = store_.lock();
    if (store == nullptr) return {};
    static_cast<void>(store->set(key_ + std::to_string(me_), mine).ok());
    const auto deadline = deadline_after(steady_clock(), kPeerSidesTimeout);
    std::vector<std::string> sides;
    for (const int rank : others) {
      const auto side =
          store->get(key_ + std::to_string(rank), time_left(steady_clock(), deadline));
      sides.push_back(side.ok() ? *side : std::string());
    }
    return sides;
  }

  int me_;
  std::vector<int> members_;
  std::weak_ptr<store::Store> store_;  // a Work may outlive the job
  std::string key_;
  CallSide side_;
};

bool is_reportable(const DistError& error) {
  return error.code() == Code::mismatch || error.code() == Code::timed_out;
}

/// Adds the details to the error of an asynchronous call's Work.
class DetailedWork final : public Work {
 public:
  DetailedWork(WorkRef work, MismatchReport detail)
      : work_(std::move(work)), detail_(std::move(detail)) {}
  bool is_completed() override { return work_->is_completed(); }
  bool is_success() override { return work_->is_success(); }
  bool wait(std::optional<Duration> timeout) override {
    try {
      return work_->wait(timeout);
    } catch (const DistError& error) {
      if (!is_reportable(error) || !work_->is_completed()) throw;
    }
    try {
      // The wait may have expired just when the call ended; then its own result counts.
      return work_->wait({});
    } catch (const DistError& error) {
      if (!is_reportable(error)) throw;
      detail_.report(error);
    }
  }
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override {
    const auto plain = work_->get_future();
    FutureRef future;
    {
      const std::lock_guard lock(mutex_);
      if (future_) return future_;
      future = future_ = c10::make_intrusive<c10::ivalue::Future>(plain->elementType());
    }
    plain->addCallback([future, detail = detail_, scope = std::weak_ptr(WorldScope::current())](
                           c10::ivalue::Future& done) { forward(done, future, detail, scope); });
    return future;
  }
  int source_rank() override { return work_->source_rank(); }
  std::exception_ptr exception() override { return work_->exception(); }
  std::vector<at::Tensor> result() override { return work_->result(); }

 private:
  using FutureRef = c10::intrusive_ptr<c10::ivalue::Future>;

  static void forward(c10::ivalue::Future& done, const FutureRef& future,
                      const MismatchReport& detail, const std::weak_ptr<WorldScope>& scope) {
    if (!done.hasError()) return future->markCompleted(done.constValue());
    try {
      std::rethrow_exception(done.exception_ptr());
    } catch (const DistError& error) {
      if (!is_reportable(error)) return future->setErrorIfNeeded(std::current_exception());
      // Waits for the other ranks' sides, so not on the thread that requested the future.
      CallbackExecutor::of_process().run([future, detail, error, scope] {
        const WorldScope::Binding bound(scope.lock());  // callbacks make calls on its groups
        try {
          detail.report(error);
        } catch (const std::exception&) {
          future->setErrorIfNeeded(std::current_exception());
        }
      });
    } catch (...) {
      future->setErrorIfNeeded(std::current_exception());
    }
  }

  WorkRef work_;
  MismatchReport detail_;
  std::mutex mutex_;  // guards `future_`, which is made once
  FutureRef future_;
};

}  // namespace

void set_caller_stack(std::function<std::string()> caller) { caller_stack() = std::move(caller); }

WorkRef submit_with_details(ProcessGroupBackend& backend, Call& call) {
  MismatchReport detail(call.group(), call);
  try {
    auto work = backend.submit(call);
    return work == nullptr ? nullptr
                           : std::make_shared<DetailedWork>(std::move(work), std::move(detail));
  } catch (const DistError& error) {
    if (!is_reportable(error)) throw;
    detail.report(error);
  }
}

}  // namespace muster::group

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

std::mutex hook_mutex;  // guards `hook()`, which is called without it
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
