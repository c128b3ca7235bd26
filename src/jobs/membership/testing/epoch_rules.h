// SPDX-License-Identifier: BSD-3-Clause
/// For tests of the rules: a view of a job, and a clock that stands where the test puts it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>

#include "jobs/membership/next_epoch.h"

namespace muster::membership::testing {

class EpochRules : public ::testing::Test {
 protected:
  /// A node that comes, or says something else of itself.
  void say(const std::string& name, const NodeReport& report) {
    if (!since.contains(name)) since[name] = ++revision;
    Update update{++revision, false, {}, {}, 0};
    update.changes.push_back({name, encode(report), since[name]});
    view.apply(update, now);
  }
  void come(const std::string& name, const std::string& host = "", int wanted = -1) {
    say(name, NodeReport{NodePhase::waiting, 0, wanted, 0, host.empty() ? name : host, {}, {}});
  }
  void say(const std::string& name, NodePhase phase, int exit_code = 0) {
    NodeReport report = view.nodes().at(name).report;
    report.phase = phase;
    report.epoch = view.epoch().number;
    report.exit_code = exit_code;
    report.reason = name + " has words for it";
    say(name, report);
  }
  /// One of its workers was killed.
  void say_killed(const std::string& name) {
    NodeReport report = view.nodes().at(name).report;
    report.phase = NodePhase::failed;
    report.epoch = view.epoch().number;
    report.killed = true;
    say(name, report);
  }
  /// It had come to the end of training in `epoch`.
  void say_trained(const std::string& name, std::int64_t epoch, NodePhase phase) {
    NodeReport report = view.nodes().at(name).report;
    report.phase = phase;
    report.epoch = view.epoch().number;
    report.trained_in = epoch;
    say(name, report);
  }
  /// Its workers have the job's state, of so many commits, since the present epoch.
  void say_state(const std::string& name, std::int64_t committed) {
    NodeReport report = view.nodes().at(name).report;
    report.state_in = view.epoch().number;
    report.committed = committed;
    say(name, report);
  }
  /// As the view of a node that comes now.
  JobView seen_late() const {
    Update all{revision, true, {}, decode_epoch(encode(view.epoch())).value(), revision};
    for (const auto& [name, node] : view.nodes())
      all.changes.push_back({name, encode(node.report), node.since});
    JobView late;
    late.apply(all, now);
    return late;
  }
  void die(const std::string& name) { end(name, /*silent=*/false); }
  void fall_silent(const std::string& name) { end(name, /*silent=*/true); }
  void end(const std::string& name, bool silent) {
    since.erase(name);
    Update update{++revision, false, {}, {}, 0};
    update.changes.push_back({name, {}, 0, silent});
    view.apply(update, now);
  }
  Decision decide() const { return next_epoch(now, view, options); }
  /// Commits what is decided, which must be something; the names by slot.
  std::map<int, std::string> commit() {
    const Decision decision = decide();
    EXPECT_TRUE(decision.commit);
    const Epoch epoch = make_epoch(view, decision);
    Update update{++revision, false, {}, decode_epoch(encode(epoch)).value(), revision};
    view.apply(update, now);
    std::map<int, std::string> names;
    for (const Member& member : epoch.members) names[member.slot] = member.name;
    return names;
  }
  /// A second epoch, which c has joined after the training of a and b was over: it was decided
  /// before that was heard of.
  void begin_anew_with_c() {
    Epoch epoch = view.epoch();
    epoch.number = 2;
    epoch.members.push_back({2, "c", encode(view.nodes().at("c").report), 2});
    view.apply(Update{++revision, false, {}, epoch, revision}, now);
    say_trained("a", 1, NodePhase::running);
  }
  /// An epoch of the nodes a, b, c ...
  void begin(int nodes) {
    options.max_nodes = std::max(options.max_nodes, nodes);
    for (int i = 0; i < nodes; ++i) come(std::string(1, static_cast<char>('a' + i)));
    now += options.last_call;
    commit();
  }

  /// An epoch of a, b and c, which say who they are.
  void begin_with_incarnations() {
    options.max_nodes = std::max(options.max_nodes, 3);
    for (const char* name : {"a", "b", "c"})
      say(name, NodeReport{.host = name, .incarnation = name});
    now += options.last_call;
    commit();
  }
  /// With the workers of the present epoch.
  void come_back(const std::string& name, const std::string& incarnation,
                 NodePhase phase = NodePhase::running) {
    say(name, NodeReport{.phase = phase,
                         .epoch = view.epoch().number,
                         .host = incarnation,
                         .incarnation = incarnation});
  }

  using Slots = std::map<int, std::string>;
  TimePoint now{std::chrono::seconds(1000)};
  EpochOptions options;
  JobView view;
  std::int64_t revision = 1;
  std::map<std::string, std::int64_t> since;
};

}  // namespace muster::membership::testing
