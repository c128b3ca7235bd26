// SPDX-License-Identifier: BSD-3-Clause
/// A node of a membership service that the test makes hang, fail and forget. For tests.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/time/clock.h"
#include "jobs/launch/node/node_membership.h"
#include "jobs/membership/update_queue.h"
#include "testing/limits.h"

namespace muster::launch {

/// The next notice for which `wanted` is true.
template <class Wanted>
NodeNotice next_notice(NodeMembership& node, Wanted wanted) {
  pollfd ready{node.descriptor(), POLLIN, 0};
  while (::poll(&ready, 1, muster::testing::kMustHappenMs) == 1) {
    for (NodeNotice& notice : node.take()) {
      if (wanted(notice)) return std::move(notice);
    }
  }
  ADD_FAILURE() << "no notice within a minute";
  return {};
}

/// A service that the test makes hang, fail and forget. It has one node, and says nothing of
/// others.
class Service {
 public:
  using Lock = std::unique_lock<std::mutex>;
  /// Requests wait from now on until `answer`; they fail while `failures` are left.
  void hang() {
    const Lock lock(mutex);
    hangs = true;
  }
  void answer() {
    const Lock lock(mutex);
    hangs = false;
    changed.notify_all();
  }
  Status request() {
    Lock lock(mutex);
    ++requests;
    changed.notify_all();
    changed.wait(lock, [this] { return !hangs; });
    if (failures == 0) return {};
    --failures;
    return Status(Code::timed_out, "no answer, " + std::to_string(failures));
  }
  template <class Condition>
  void until(Condition condition) {
    Lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, muster::testing::kMustHappen, condition));
  }
  void tell(membership::Update update) {
    const Lock lock(mutex);
    update.revision = ++revision;
    watching.push(std::move(update));
  }

  std::mutex mutex;
  std::condition_variable changed;
  bool hangs = false;
  bool lost = false;    // the first hold
  bool silent = false;  // about every hold
  Duration late{0};     // so late the node runs again after each wait
  int requests = 0, failures = 0, holds = 0;
  std::int64_t revision = 0;
  std::vector<std::string> names;
  std::vector<membership::NodeReport> reports;
  std::vector<membership::Epoch> epochs;
  membership::UpdateQueue watching;
};

class ServiceHold final : public membership::Hold {
 public:
  ServiceHold(Service& service, std::string name, int number)
      : service_(service), name_(std::move(name)), number_(number) {}
  ~ServiceHold() override { (void)service_.request(); }
  Status set(std::string_view value) override {
    if (Status asked = service_.request(); !asked) return asked;
    note(value);
    return {};
  }
  Status state() const override {
    const Service::Lock lock(service_.mutex);
    if (service_.lost && number_ == 1) return Status(Code::refused, "a test");
    return service_.silent ? Status(Code::timed_out, "a test") : Status();
  }
  TimePoint expires() const override {
    return steady_clock().now() + (state() ? std::chrono::milliseconds(20) : Duration(0));
  }
  void note(std::string_view value) {
    {
      const Service::Lock lock(service_.mutex);
      service_.reports.push_back(*membership::decode_report(value));
      service_.changed.notify_all();
    }
    membership::Update update;
    update.changes.push_back({name_, std::string(value), number_});
    service_.tell(std::move(update));
  }

 private:
  Service& service_;
  const std::string name_;
  const int number_;
};

class ServiceWatch final : public membership::Watch {
 public:
  explicit ServiceWatch(Service& service) : service_(service) {}
  Result<membership::Update> next(Duration timeout) override {
    auto update = service_.watching.next(timeout);
    std::this_thread::sleep_for(service_.late);  // the fault itself
    return update;
  }
  void close() override { service_.watching.close(); }

 private:
  Service& service_;
};

class ServiceMembership final : public membership::Membership {
 public:
  explicit ServiceMembership(Service& service) : service_(service) {}
  Result<std::unique_ptr<membership::Hold>> hold(std::string_view name, std::string_view value,
                                                 Duration) override {
    if (Status asked = service_.request(); !asked) return asked;
    int number = 0;
    {
      const Service::Lock lock(service_.mutex);
      // As after an election: the service still knows every earlier hold.
      for (const std::string& known : service_.names)
        if (known == name) return Status(Code::refused, std::string(name) + " is held");
      number = ++service_.holds;
    }
    auto hold = std::make_unique<ServiceHold>(service_, std::string(name), number);
    hold->note(value);
    const Service::Lock lock(service_.mutex);  // those who see the name see the report too
    service_.names.emplace_back(name);
    service_.changed.notify_all();
    return std::unique_ptr<membership::Hold>(std::move(hold));
  }
  Result<std::unique_ptr<membership::Watch>> watch(std::string_view) override {
    return std::unique_ptr<membership::Watch>(std::make_unique<ServiceWatch>(service_));
  }
  Result<std::int64_t> commit(const membership::Epoch& epoch, std::int64_t) override {
    if (Status asked = service_.request(); !asked) return asked;
    {
      const Service::Lock lock(service_.mutex);
      service_.epochs.push_back(epoch);
    }
    membership::Update update;
    update.epoch = epoch;
    update.epoch_revision = epoch.number;
    service_.tell(std::move(update));
    return epoch.number;
  }
  const char* kind() const override { return "a test"; }

 private:
  Service& service_;
};

class NodeOfService : public ::testing::Test {
 protected:
  std::unique_ptr<NodeMembership> join() {
    NodeMembershipOptions here;
    here.name = "node/a";
    here.place = "the service";
    here.ttl = std::chrono::milliseconds(20);
    here.out_limit = out_limit;
    here.epochs.silence_patience = silence_patience;
    here.epochs.repair_timeout = repair_timeout;
    auto node = NodeMembership::join(
        std::make_unique<ServiceMembership>(service), here,
        NodeDetails{NodeFacts{1, "default", "a host", 0}, "a launcher", "a host", 1});
    EXPECT_TRUE(node.ok()) << node.status().message();
    return std::move(*node);
  }
  NodeNotice next_event(NodeMembership& node) {
    return next_notice(node, [](const NodeNotice& notice) { return notice.event.has_value(); });
  }
  bool has_epoch(const NodeNotice& notice, std::int64_t number, bool seated) {
    const auto* epoch = notice.event ? std::get_if<NewEpoch>(&*notice.event) : nullptr;
    return epoch != nullptr && epoch->number == number && epoch->seated == seated;
  }

  /// Nothing of the next events is an epoch: the node's failure, which ends the job, comes first.
  void expect_that_nothing_has_happened(NodeMembership& node) {
    node.report(membership::NodePhase::failed, 1, 3, "words");
    const NodeNotice over = next_event(node);
    ASSERT_TRUE(over.event && std::holds_alternative<JobEnded>(*over.event));
    EXPECT_EQ(std::get<JobEnded>(*over.event).reason, "words");
  }

  Service service;
  Duration out_limit = muster::testing::kMustHappen;
  Duration silence_patience{0}, repair_timeout{0};
};

}  // namespace muster::launch
