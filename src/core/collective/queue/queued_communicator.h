// SPDX-License-Identifier: BSD-3-Clause
/// The common part of communicators with a queue of calls, over links or over shared memory.
#pragma once

#include <cxxabi.h>

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/process/fork_guard.h"
#include "core/collective/communicator.h"
#include "core/collective/group_context.h"
#include "core/collective/queue/closing.h"
#include "core/collective/queue/driver.h"

namespace muster::collective {

class QueuedCommunicator : public Communicator, public Driver, public Closable {
 public:
  explicit QueuedCommunicator(GroupContext group) : group_(std::move(group)) {}

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  std::span<const int> members() const override { return group_.channel->members(); }
  const std::string& name() const override { return group_.name; }
  transport::Channel& channel() override { return *group_.channel; }
  Status failure() const override { return group_.channel->failure(); }
  std::shared_ptr<transport::Fabric> fabric() override { return group_.fabric; }

 protected:
  /// Whether calls cannot be made here any more, or not in this process.
  bool is_over() const { return mark_.forked() || closed_.load(); }
  bool is_forked() const { return mark_.forked(); }
  /// Whether it was open. Only the caller that gets true closes.
  bool begin_close() { return !mark_.forked() && !closed_.exchange(true); }
  /// `in_child`: what a forked child is told, after the name of the group.
  Status check(const Args& args, std::string_view in_child) const;
  /// For a call, an `op`, that could not be started: fails the group, since the others would wait
  /// for it.
  PendingRef fail_start(Op op, const Status& why);
  /// Fails the group with the reason that this rank gives.
  void fail_by_abort(const std::string& reason);
  /// An exception in `work` fails the group, because `work` serves all of its calls.
  template <class Work>
  void guarded(Work work) {
    try {
      work();
    } catch (const abi::__forced_unwind&) {  // the thread is being terminated
      throw;
    } catch (...) {
      static_cast<void>(group_.fail_by_exception());
    }
  }

  const GroupContext group_;

 private:
  const ProcessMark mark_;
  std::atomic<bool> closed_{false};
};

}  // namespace muster::collective
