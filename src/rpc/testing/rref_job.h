// SPDX-License-Identifier: BSD-3-Clause
/// A complete job of the remote reference protocol, run in every order of events: the workers'
/// ledgers, the wire between them, and programs that hold references. Checks after every event that
/// nothing a worker holds has been dropped, and at every end that nothing is left.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "rpc/rref/rref_protocol.h"
#include "testing/seed.h"

namespace muster::rpc::rref_test {

// A step of a worker's program; a variable holds one reference.
struct Step {
  enum Do { create_here, create_at, pass, drop } what;
  int variable;
  int to = -1;           // create_at, pass: worker
  int to_variable = -1;  // ... and the variable for the arriving reference
};
// Runs in order once its trigger variable holds a reference; without a trigger, from the start.
struct Thread {
  int worker;
  int trigger;
  std::vector<Step> steps;
};
struct Budget {
  int duplicates = 0;  // deliveries that leave the message on the wire
  int losses = 0;      // calls that fail, whether or not they arrived
  int deaths = 0;
  int left() const { return duplicates + losses + deaths; }
};

struct Flying {
  RRefMessage message;
  int to_variable = -1;
  bool operator<(const Flying& other) const { return message < other.message; }
};

struct Variable {
  std::optional<RRefReference> reference;
  bool filled = false;  // set once
  bool failed = false;
};

// A complete job: the workers' ledgers, the wire, and the programs' variables. Copied at every
// branch.
struct Job {
  Job(int workers, int variables, const std::vector<Thread>* threads, Budget budget)
      : threads(threads),
        budget(budget),
        at(threads->size(), 0),
        variables(static_cast<std::size_t>(variables)) {
    for (int worker = 0; worker < workers; ++worker) ledgers.emplace_back(worker);
    alive.assign(static_cast<std::size_t>(workers), true);
    noticed.assign(static_cast<std::size_t>(workers),
                   std::vector<bool>(static_cast<std::size_t>(workers), false));
  }

  const std::vector<Thread>* threads;
  Budget budget;
  std::vector<std::size_t> at;  // next step of each thread
  std::vector<Variable> variables;
  std::vector<RRefLedger> ledgers;
  std::vector<bool> alive;
  std::vector<std::vector<bool>> noticed;  // [by][whom]
  std::vector<Flying> wire;
  std::set<RRefId> dropped;
  std::set<ForkId> arrived;  // duplicates carry nothing
  int created = 0;
  bool someone_died = false, something_lost = false;
  std::string trouble;

  RRefLedger& ledger(int worker) { return ledgers[static_cast<std::size_t>(worker)]; }
  Variable& variable(int index) { return variables[static_cast<std::size_t>(index)]; }
  bool lives(int worker) const { return alive[static_cast<std::size_t>(worker)]; }

  // All possible next events: steps of threads, deliveries, and so on. Each is a function to call
  // on a copy.
  std::vector<std::function<void(Job&)>> events() const {
    std::vector<std::function<void(Job&)>> all;
    for (std::size_t thread = 0; thread < threads->size(); ++thread) {
      if (can_step(thread)) all.push_back([thread](Job& job) { job.step(thread); });
    }
    for (std::size_t index = 0; index < wire.size(); ++index) {
      if (index > 0 && !(wire[index - 1] < wire[index]))
        continue;  // the same message twice is one event
      const RRefMessage& message = wire[index].message;
      if (!lives(message.to)) continue;
      all.push_back([index](Job& job) { job.deliver(index, false); });
      if (budget.duplicates > 0) all.push_back([index](Job& job) { job.deliver(index, true); });
      const bool in_a_call =
          message.kind == RRefMessageKind::create || message.kind == RRefMessageKind::fork;
      if (in_a_call && budget.losses > 0 && lives(message.from)) {
        all.push_back([index](Job& job) { job.lose(index, true); });
        all.push_back([index](Job& job) { job.lose(index, false); });
      }
    }
    const int workers = static_cast<int>(ledgers.size());
    for (int worker = 0; worker < workers; ++worker) {
      if (budget.deaths > 0 && lives(worker))
        all.push_back([worker](Job& job) { job.kill(worker); });
      for (int by = 0; by < workers; ++by) {
        if (!lives(worker) && lives(by) &&
            !noticed[static_cast<std::size_t>(by)][static_cast<std::size_t>(worker)]) {
          all.push_back([by, worker](Job& job) { job.notice(by, worker); });
        }
      }
    }
    return all;
  }

  bool can_step(std::size_t thread) const {
    const Thread& program = (*threads)[thread];
    if (!lives(program.worker) || at[thread] == program.steps.size()) return false;
    return program.trigger < 0 || variables[static_cast<std::size_t>(program.trigger)].filled;
  }

  void step(std::size_t thread) {
    const Thread& program = (*threads)[thread];
    const Step& todo = program.steps[at[thread]++];
    RRefLedger& own = ledger(program.worker);
    Variable& held = variable(todo.variable);
    switch (todo.what) {
      case Step::create_here:
        fill(todo.variable, own.create_here(), true);
        ++created;
        break;
      case Step::create_at:
        if (auto made = own.create_at(todo.to); made.ok()) {
          fill(todo.variable, made->reference, true);
          wire.push_back({made->message, todo.to_variable});
          ++created;
        } else {
          fill(todo.variable, {}, false);
        }
        break;
      case Step::pass:
        if (!held.reference) break;
        if (auto message = own.fork(*held.reference, todo.to); message.ok()) {
          wire.push_back({*message, todo.to_variable});
        } else if (!someone_died && !something_lost) {
          trouble = "a reference could not be passed on: " + message.status().message();
        }
        break;
      case Step::drop:
        if (held.reference) own.drop(*held.reference);
        held.reference.reset();
        break;
    }
    follow(program.worker);
  }

  void fill(int index, std::optional<RRefReference> reference, bool good) {
    Variable& into = variable(index);
    into.reference = std::move(reference);
    into.filled = true;
    into.failed = !good;
  }

  void deliver(std::size_t index, bool again) {
    const Flying flying = wire[index];
    if (again) {
      --budget.duplicates;
    } else {
      wire.erase(wire.begin() + static_cast<std::ptrdiff_t>(index));
    }
    RRefLedger& to = ledger(flying.message.to);
    auto received = to.receive(flying.message);
    if (!received.ok()) {
      trouble = received.status().message();
      return;
    }
    if (*received) arrived.insert(flying.message.fork);
    if (*received) fill(flying.to_variable, (*received)->reference, (*received)->status.ok());
    if (lives(flying.message.from))
      ledger(flying.message.from).acknowledged(flying.message.to, flying.message.number);
    follow(flying.message.to);
  }

  // A call fails on its caller; its message may still arrive.
  void lose(std::size_t index, bool for_good) {
    const Flying flying = wire[index];
    --budget.losses;
    something_lost = true;
    if (for_good) wire.erase(wire.begin() + static_cast<std::ptrdiff_t>(index));
    ledger(flying.message.from).lost(flying.message);
    follow(flying.message.from);
  }

  void kill(int worker) {
    --budget.deaths;
    someone_died = true;
    alive[static_cast<std::size_t>(worker)] = false;
    std::erase_if(wire, [&](const Flying& flying) { return flying.message.to == worker; });
  }
  void notice(int by, int worker) {
    noticed[static_cast<std::size_t>(by)][static_cast<std::size_t>(worker)] = true;
    ledger(by).worker_died(
        worker, Status(Code::peer_failed, "worker " + std::to_string(worker) + " died", {worker}));
    follow(by);
  }

  // Puts the resulting messages on the wire, and checks that nothing was dropped too early.
  void follow(int worker) {
    const RRefEffects effects = ledger(worker).take_effects();
    for (const RRefMessage& message : effects.send) {
      if (lives(message.to)) wire.push_back({message, -1});
    }
    for (const auto& [reference, status] : effects.failed) {
      if (!someone_died && !something_lost)
        trouble = "a reference failed though nobody died: " + status.message();
      for (Variable& held : variables) {
        if (held.reference == reference) held.failed = true;
      }
    }
    for (const RRefId& rref : effects.drop) {
      if (!dropped.insert(rref).second) trouble = "a value was dropped twice";
      look_for_holders(rref);
    }
    std::sort(wire.begin(), wire.end());
  }

  void look_for_holders(const RRefId& rref) {
    for (std::size_t thread = 0; thread < threads->size(); ++thread) {
      const Thread& program = (*threads)[thread];
      if (!lives(program.worker)) continue;
      for (const Step& step : program.steps) {
        const Variable& held = variable(step.variable);
        if (!held.reference || held.failed || held.reference->rref != rref) continue;
        const int holder = held.reference->fork ? held.reference->fork->holder : rref.owner;
        if (holder != program.worker || !lives(holder)) continue;
        const bool counted = ledger(holder).confirmed(*held.reference);
        if (counted || !(someone_died || something_lost))
          trouble = "a value was dropped while worker " + std::to_string(holder) + " held it";
      }
    }
    for (const Flying& flying : wire) {
      const bool carried = flying.message.kind == RRefMessageKind::fork &&
                           flying.message.rref == rref && !arrived.contains(flying.message.fork);
      if (carried && !someone_died && !something_lost)
        trouble = "a value was dropped while a reference to it was on its way";
    }
  }

  void check_end() {
    const auto say = [this](const std::string& what) {
      if (trouble.empty()) trouble = what;
    };
    for (std::size_t thread = 0; thread < threads->size(); ++thread) {
      if (can_step(thread)) say("a program did not come to its end");
    }
    std::size_t living_drops = 0;
    for (std::size_t worker = 0; worker < ledgers.size(); ++worker) {
      if (alive[worker] && !ledgers[worker].empty())
        say("something is left: " + ledgers[worker].text());
    }
    for (const RRefId& rref : dropped) living_drops += static_cast<std::size_t>(lives(rref.owner));
    if (!someone_died && !something_lost && static_cast<int>(living_drops) != created)
      say("not every value was dropped");
  }

  std::string text() const {
    std::string out;
    for (std::size_t worker = 0; worker < ledgers.size(); ++worker) {
      if (!alive[worker]) {
        out += "x";
        continue;
      }
      out += ledgers[worker].text();
    }
    for (const Flying& flying : wire)
      out += encode(flying.message) + std::to_string(flying.to_variable);
    for (const auto step : at) out += "|" + std::to_string(step);
    for (const Variable& held : variables) {
      out += held.filled ? (held.failed ? "f" : "v") : "-";
      if (held.reference && held.reference->fork)
        out += std::to_string(held.reference->fork->maker) + "." +
               std::to_string(held.reference->fork->number);
      if (held.reference) out += ":" + std::to_string(held.reference->rref.number);
    }
    for (const auto& by : noticed) {
      for (const bool known : by) out += known ? '1' : '0';
    }
    for (const RRefId& rref : dropped)
      out += "d" + std::to_string(rref.owner) + "." + std::to_string(rref.number);
    return out + "/" + std::to_string(budget.duplicates) + std::to_string(budget.losses) +
           std::to_string(budget.deaths);
  }
};

struct Scenario {
  const char* name;
  int workers;
  int variables;
  std::vector<Thread> threads;
};

inline constexpr Step::Do kHere = Step::create_here, kAt = Step::create_at, kPass = Step::pass,
                          kDrop = Step::drop;

// Worker 0 is usually the caller, 1 the owner, 2 another user. The owner's handle for the running
// call is an ordinary variable.
inline const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = {
      {"made over there and let go",
       2,
       2,
       {{0, -1, {{kAt, 0, 1, 1}, {kDrop, 0}}}, {1, 1, {{kDrop, 1}}}}},
      {"passed from user to user",
       3,
       3,
       {{0, -1, {{kAt, 0, 1, 1}, {kPass, 0, 2, 2}, {kDrop, 0}}},
        {1, 1, {{kDrop, 1}}},
        {2, 2, {{kDrop, 2}}}}},
      {"passed on and home again",
       3,
       4,
       {{0, -1, {{kAt, 0, 1, 1}, {kPass, 0, 2, 2}, {kDrop, 0}}},
        {1, 1, {{kDrop, 1}}},
        {2, 2, {{kPass, 2, 1, 3}, {kDrop, 2}}},
        {1, 3, {{kDrop, 3}}}}},
      {"passed on and back to its caller",
       3,
       4,
       {{0, -1, {{kAt, 0, 1, 1}, {kPass, 0, 2, 2}, {kDrop, 0}}},
        {1, 1, {{kDrop, 1}}},
        {2, 2, {{kPass, 2, 0, 3}, {kDrop, 2}}},
        {0, 3, {{kDrop, 3}}}}},
      {"given by the owner to two, one gives it to the other",
       3,
       4,
       {{1, -1, {{kHere, 0}, {kPass, 0, 0, 1}, {kPass, 0, 2, 2}, {kDrop, 0}}},
        {0, 1, {{kPass, 1, 2, 3}, {kDrop, 1}}},
        {2, 2, {{kDrop, 2}}},
        {2, 3, {{kDrop, 3}}}}},
      {"home before the call that makes it",
       2,
       3,
       {{0, -1, {{kAt, 0, 1, 1}, {kPass, 0, 1, 2}, {kDrop, 0}}},
        {1, 1, {{kDrop, 1}}},
        {1, 2, {{kDrop, 2}}}}},
      {"passed on by the owner before it is made",
       3,
       4,
       {{0, -1, {{kAt, 0, 1, 1}, {kPass, 0, 1, 2}, {kDrop, 0}}},
        {1, 1, {{kDrop, 1}}},
        {1, 2, {{kPass, 2, 2, 3}, {kDrop, 2}}},
        {2, 3, {{kDrop, 3}}}}},
      {"twice to the same worker",
       3,
       4,
       {{0, -1, {{kAt, 0, 1, 1}, {kPass, 0, 2, 2}, {kPass, 0, 2, 3}, {kDrop, 0}}},
        {1, 1, {{kDrop, 1}}},
        {2, 2, {{kDrop, 2}}},
        {2, 3, {{kDrop, 3}}}}},
      {"to itself, on the owner and off it",
       2,
       5,
       {{1, -1, {{kHere, 0}, {kPass, 0, 1, 1}, {kPass, 0, 0, 2}, {kDrop, 0}}},
        {1, 1, {{kDrop, 1}}},
        {0, 2, {{kPass, 2, 0, 3}, {kDrop, 2}}},
        {0, 3, {{kDrop, 3}}}}},
      {"two values, each other's",
       2,
       4,
       {{0, -1, {{kAt, 0, 1, 1}, {kDrop, 0}}},
        {1, 1, {{kDrop, 1}}},
        {1, -1, {{kAt, 2, 0, 3}, {kDrop, 2}}},
        {0, 3, {{kDrop, 3}}}}},
  };
  return all;
}

struct Played {
  std::size_t states = 0;
  bool whole = false;
  std::string trouble;
};

// Runs every order of events, until the first problem or the time limit.
inline Played play_all(const Scenario& scenario, Budget budget,
                       std::chrono::duration<double> limit) {
  const auto begin = std::chrono::steady_clock::now();
  std::mt19937_64 random(muster::testing::test_seed());
  std::unordered_set<std::size_t> seen;
  std::vector<Job> open{Job(scenario.workers, scenario.variables, &scenario.threads, budget)};
  const auto trouble_at = [&](const Job& job) {
    return Played{seen.size(), false, std::string(scenario.name) + ": " + job.trouble};
  };
  while (!open.empty() && std::chrono::steady_clock::now() - begin < limit) {
    // In random order, so that an incomplete run samples all depths. A long run goes depth-first,
    // which keeps fewer states.
    if (!muster::testing::long_tests()) std::swap(open[random() % open.size()], open.back());
    Job job = std::move(open.back());
    open.pop_back();
    // Duplicates, losses and deaths need not happen: a state is an end if nothing else can happen.
    bool only_faults = true;
    for (const auto& event : job.events()) {
      Job next = job;
      event(next);
      if (!next.trouble.empty()) return trouble_at(next);
      only_faults = only_faults && next.budget.left() < job.budget.left();
      if (seen.insert(std::hash<std::string>()(next.text())).second)
        open.push_back(std::move(next));
    }
    if (!only_faults) continue;
    job.check_end();
    if (!job.trouble.empty()) return trouble_at(job);
  }
  return {seen.size(), open.empty(), {}};
}

}  // namespace muster::rpc::rref_test
