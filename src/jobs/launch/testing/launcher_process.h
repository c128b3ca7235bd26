// SPDX-License-Identifier: BSD-3-Clause
/// A launcher in a process that stands still, and workers that the test trains meanwhile. For
/// tests.
///
/// The launcher is a NodeMembership and the decisions of `launcher_machine.h`. Its workers are two
/// numbers in memory that it shares with the test: a launcher that stands still stops no worker.
#pragma once

#include <poll.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <variant>

#include "jobs/launch/launcher_machine.h"
#include "jobs/launch/node/node_membership.h"

namespace muster::launch {

/// Workers in an epoch. `life` counts those that the launcher has started; epoch 0: none runs.
/// Aligned, so that an atomic one is a word of the machine.
struct alignas(8) BegunWorkers {
  std::uint32_t epoch = 0;
  std::uint16_t life = 0, members = 0;
};
/// The commits that the workers of `life` have in memory, and the epoch in which they got them.
struct alignas(8) TrainedWorkers {
  std::uint32_t commits = 0;
  std::uint16_t life = 0, state_in = 0;
};

/// Written by one process, read by the other.
struct SharedNode {
  std::atomic<BegunWorkers> begun{};  ///< by the launcher
  std::atomic<TrainedWorkers> has{};  ///< by the test
  std::atomic<bool> counts{false};    ///< by the test: points at which it may stand still count now
  std::atomic<bool> stands{false};    ///< by the launcher: it has come to the point
  std::atomic<bool> joined{false};
  std::atomic<bool> left{false};  ///< for the reason in `why`
  std::array<char, 1000> why{};
  /// Hashes of the epochs that it has committed or seen, by number; 0: not seen.
  std::array<std::atomic<std::uint64_t>, 64> epochs{};
  std::atomic<bool> two_of_one_number{false};

  void note_epoch(const membership::Epoch& epoch) {
    const std::uint64_t hash = std::hash<std::string>()(membership::encode(epoch)) | 1;
    const auto at = static_cast<std::size_t>(epoch.number) % epochs.size();
    if (const std::uint64_t before = epochs[at].exchange(hash); before != 0 && before != hash)
      two_of_one_number = true;
  }
};
static_assert(std::atomic<BegunWorkers>::is_always_lock_free &&
              std::atomic<TrainedWorkers>::is_always_lock_free);

/// One SharedNode that forked processes share.
class SharedNodeMemory {
 public:
  SharedNodeMemory() {
    void* memory = ::mmap(nullptr, sizeof(SharedNode), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    node_ = new (memory) SharedNode();
  }
  ~SharedNodeMemory() { ::munmap(node_, sizeof(SharedNode)); }
  SharedNodeMemory(const SharedNodeMemory&) = delete;
  SharedNodeMemory& operator=(const SharedNodeMemory&) = delete;
  SharedNode& operator*() const { return *node_; }
  SharedNode* operator->() const { return node_; }

 private:
  SharedNode* node_ = nullptr;
};

class LauncherProcess {
 public:
  LauncherProcess(SharedNode& shared, LauncherRules rules)
      : shared_(shared), rules_(std::move(rules)) {}

  /// Until the launcher has left the job.
  void run(std::unique_ptr<membership::Membership> membership, const NodeMembershipOptions& options,
           const NodeDetails& details) {
    auto joined = NodeMembership::join(std::move(membership), options, details);
    if (!joined) return leave(joined.status().message());
    node_ = std::move(*joined);
    shared_.joined = true;
    happen(Begin{});
    while (!finished_) {
      pollfd ready{node_->descriptor(), POLLIN, 0};
      ::poll(&ready, 1, kPaceMs);
      for (const NodeNotice& notice : node_->take()) follow(notice);
      if (steady_clock().now() >= state_.timer) happen(TimerFired{});
      const TrainedWorkers has = shared_.has;
      const bool counts = runs_ && has.life == life_;
      node_->note_state(counts ? StateNote{.epoch = has.state_in, .committed = has.commits}
                               : StateNote{});
    }
    leave(state_.other_node);
  }

 private:
  static constexpr int kPaceMs = 20;  // at which it hears from its workers

  void follow(const NodeNotice& notice) {
    if (notice.plan) shared_.note_epoch(notice.plan->epoch);
    if (!notice.event || finished_) return;
    if (notice.plan && notice.plan->node >= 0) plan_ = notice.plan;
    happen(*notice.event);
  }

  void happen(const LauncherEvent& event) {
    events_.push_back(event);
    if (events_.size() > 1) return;
    for (; !events_.empty(); events_.pop_front()) {
      Decision decision = decide(steady_clock().now(), rules_, std::move(state_), events_.front());
      state_ = std::move(decision.state);
      for (const LauncherAction& action : decision.actions) act(action);
    }
  }

  /// No worker fails or ends well, so the others are told nothing of that.
  void act(const LauncherAction& action) {
    if (std::holds_alternative<StartWorkers>(action)) {
      ++life_;
      begin();
    } else if (std::holds_alternative<RepairWorkers>(action)) {
      begin();
    } else if (std::holds_alternative<AskForCommit>(action)) {
      events_.push_back(CommitHandedOver{});
    } else if (const auto* signal = std::get_if<SignalWorkers>(&action); signal && runs_) {
      runs_ = false;
      shared_.begun = BegunWorkers{0, life_, 0};
      events_.push_back(WorkerEnded{0, ProcessExit{0, signal->signal}});
    } else if (std::holds_alternative<Finish>(action)) {
      finished_ = true;
    }
  }

  void begin() {
    runs_ = true;
    shared_.begun = BegunWorkers{static_cast<std::uint32_t>(plan_->epoch.number), life_,
                                 static_cast<std::uint16_t>(plan_->nodes.size())};
  }

  void leave(const std::string& why) {
    shared_.begun = BegunWorkers{0, life_, 0};
    why.copy(shared_.why.data(), shared_.why.size() - 1);
    shared_.left = true;
  }

  SharedNode& shared_;
  const LauncherRules rules_;
  std::unique_ptr<NodeMembership> node_;
  std::shared_ptr<const EpochPlan> plan_;
  LauncherState state_;
  std::deque<LauncherEvent> events_;
  bool runs_ = false, finished_ = false;
  std::uint16_t life_ = 0;
};

}  // namespace muster::launch
