// Small jobs are played in every order of events; larger ones as seeds say. After every event: nothing that a worker holds has been
// dropped. At every end: nothing is left.
#include "muster/rpc/rref_protocol.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <random>
#include <unordered_set>

#include "muster/testing/budget.h"
#include "muster/testing/seed.h"

namespace muster::rpc {
namespace {

using Kind = RRefMessageKind;

// What a worker's program does with its variables; a variable holds one reference.
struct Step {
  enum Do { create_here, create_at, pass, drop } what;
  int variable;
  int to = -1;           // create_at, pass: worker
  int to_variable = -1;  // ... and where the reference that arrives is put
};
// Runs in order once its trigger holds a reference; without a trigger from the start.
struct Thread {
  int worker;
  int trigger;
  std::vector<Step> steps;
};
struct Budget {
  int duplicates = 0;  // deliveries that leave the message on the wire
  int losses = 0;      // calls that fail, having arrived or not
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
  bool filled = false;  // once
  bool failed = false;
};

// A whole job: workers' ledgers, the wire, and what the programs hold. Copied at every branching.
struct Job {
  Job(int workers, int variables, const std::vector<Thread>* threads, Budget budget)
      : threads(threads), budget(budget), at(threads->size(), 0), variables(static_cast<std::size_t>(variables)) {
    for (int worker = 0; worker < workers; ++worker) ledgers.emplace_back(worker);
    alive.assign(static_cast<std::size_t>(workers), true);
    noticed.assign(static_cast<std::size_t>(workers), std::vector<bool>(static_cast<std::size_t>(workers), false));
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
  std::set<ForkId> arrived;  // second deliveries carry nothing
  int created = 0;
  bool someone_died = false, something_lost = false;
  std::string trouble;

  RRefLedger& ledger(int worker) { return ledgers[static_cast<std::size_t>(worker)]; }
  Variable& variable(int index) { return variables[static_cast<std::size_t>(index)]; }
  bool lives(int worker) const { return alive[static_cast<std::size_t>(worker)]; }

  // The next event of each sort: 0.. threads, then deliveries and so on. Each is a function to call on a copy.
  std::vector<std::function<void(Job&)>> events() const {
    std::vector<std::function<void(Job&)>> all;
    for (std::size_t thread = 0; thread < threads->size(); ++thread) {
      if (can_step(thread)) all.push_back([thread](Job& job) { job.step(thread); });
    }
    for (std::size_t index = 0; index < wire.size(); ++index) {
      if (index > 0 && !(wire[index - 1] < wire[index])) continue;  // the same message twice: one event
      const RRefMessage& message = wire[index].message;
      if (!lives(message.to)) continue;
      all.push_back([index](Job& job) { job.deliver(index, false); });
      if (budget.duplicates > 0) all.push_back([index](Job& job) { job.deliver(index, true); });
      const bool in_a_call = message.kind == Kind::create || message.kind == Kind::fork;
      if (in_a_call && budget.losses > 0 && lives(message.from)) {
        all.push_back([index](Job& job) { job.lose(index, true); });
        all.push_back([index](Job& job) { job.lose(index, false); });
      }
    }
    const int workers = static_cast<int>(ledgers.size());
    for (int worker = 0; worker < workers; ++worker) {
      if (budget.deaths > 0 && lives(worker)) all.push_back([worker](Job& job) { job.kill(worker); });
      for (int by = 0; by < workers; ++by) {
        if (!lives(worker) && lives(by) && !noticed[static_cast<std::size_t>(by)][static_cast<std::size_t>(worker)]) {
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
    if (lives(flying.message.from)) ledger(flying.message.from).acknowledged(flying.message.to, flying.message.number);
    follow(flying.message.to);
  }

  // A call fails on its caller; what it carried may still come.
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
    ledger(by).worker_died(worker, Status(Code::peer_failed, "worker " + std::to_string(worker) + " died", {worker}));
    follow(by);
  }

  // Puts what follows on the wire, and looks whether something went too early.
  void follow(int worker) {
    const RRefEffects effects = ledger(worker).take_effects();
    for (const RRefMessage& message : effects.send) {
      if (lives(message.to)) wire.push_back({message, -1});
    }
    for (const auto& [reference, status] : effects.failed) {
      if (!someone_died && !something_lost) trouble = "a reference failed though nobody died: " + status.message();
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
      const bool carried = flying.message.kind == Kind::fork && flying.message.rref == rref && !arrived.contains(flying.message.fork);
      if (carried && !someone_died && !something_lost) trouble = "a value was dropped while a reference to it was on its way";
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
      if (alive[worker] && !ledgers[worker].empty()) say("something is left: " + ledgers[worker].text());
    }
    for (const RRefId& rref : dropped) living_drops += static_cast<std::size_t>(lives(rref.owner));
    if (!someone_died && !something_lost && static_cast<int>(living_drops) != created) say("not every value was dropped");
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
    for (const Flying& flying : wire) out += encode(flying.message) + std::to_string(flying.to_variable);
    for (const auto step : at) out += "|" + std::to_string(step);
    for (const Variable& held : variables) {
      out += held.filled ? (held.failed ? "f" : "v") : "-";
      if (held.reference && held.reference->fork)
        out += std::to_string(held.reference->fork->maker) + "." + std::to_string(held.reference->fork->number);
      if (held.reference) out += ":" + std::to_string(held.reference->rref.number);
    }
    for (const auto& by : noticed) {
      for (const bool known : by) out += known ? '1' : '0';
    }
    for (const RRefId& rref : dropped) out += "d" + std::to_string(rref.owner) + "." + std::to_string(rref.number);
    return out + "/" + std::to_string(budget.duplicates) + std::to_string(budget.losses) + std::to_string(budget.deaths);
  }
};

struct Scenario {
  const char* name;
  int workers;
  int variables;
  std::vector<Thread> threads;
};

constexpr Step::Do kHere = Step::create_here, kAt = Step::create_at, kPass = Step::pass, kDrop = Step::drop;

// Worker 0 is mostly the caller, 1 the owner, 2 another user. The owner's handle for the running call is a variable like others.
const std::vector<Scenario>& scenarios() {
  static const std::vector<Scenario> all = {
      {"made over there and let go", 2, 2, {{0, -1, {{kAt, 0, 1, 1}, {kDrop, 0}}}, {1, 1, {{kDrop, 1}}}}},
      {"passed from user to user",
       3,
       3,
       {{0, -1, {{kAt, 0, 1, 1}, {kPass, 0, 2, 2}, {kDrop, 0}}}, {1, 1, {{kDrop, 1}}}, {2, 2, {{kDrop, 2}}}}},
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
       {{0, -1, {{kAt, 0, 1, 1}, {kPass, 0, 1, 2}, {kDrop, 0}}}, {1, 1, {{kDrop, 1}}}, {1, 2, {{kDrop, 2}}}}},
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
       {{0, -1, {{kAt, 0, 1, 1}, {kDrop, 0}}}, {1, 1, {{kDrop, 1}}}, {1, -1, {{kAt, 2, 0, 3}, {kDrop, 2}}}, {0, 3, {{kDrop, 3}}}}},
  };
  return all;
}

struct Played {
  std::size_t states = 0;
  bool whole = false;
  std::string trouble;
};

// Every order of events, until the first trouble or the limit.
Played play_all(const Scenario& scenario, Budget budget, std::chrono::duration<double> limit) {
  const auto begin = std::chrono::steady_clock::now();
  std::mt19937_64 random(testing::test_seed());
  std::unordered_set<std::size_t> seen;
  std::vector<Job> open{Job(scenario.workers, scenario.variables, &scenario.threads, budget)};
  const auto trouble_at = [&](const Job& job) { return Played{seen.size(), false, std::string(scenario.name) + ": " + job.trouble}; };
  while (!open.empty() && std::chrono::steady_clock::now() - begin < limit) {
    // At random: where not all is played, it is a sample of all depths. A long run keeps fewer in hand by going deep.
    if (!testing::long_tests()) std::swap(open[random() % open.size()], open.back());
    Job job = std::move(open.back());
    open.pop_back();
    bool only_faults = true;  // duplicates, losses and deaths need not happen: an end is where nothing else can
    for (const auto& event : job.events()) {
      Job next = job;
      event(next);
      if (!next.trouble.empty()) return trouble_at(next);
      only_faults = only_faults && next.budget.left() < job.budget.left();
      if (seen.insert(std::hash<std::string>()(next.text())).second) open.push_back(std::move(next));
    }
    if (!only_faults) continue;
    job.check_end();
    if (!job.trouble.empty()) return trouble_at(job);
  }
  return {seen.size(), open.empty(), {}};
}

// `seconds`: per scenario in an ordinary run; a long one plays all, or a minute of it where there are millions.
void play_all_scenarios(Budget budget, double seconds) {
  std::size_t states = 0, whole = 0;
  for (const Scenario& scenario : scenarios()) {
    const Played played = play_all(scenario, budget, testing::test_budget(seconds, 60));
    EXPECT_EQ(played.trouble, "") << played.states << " states";
    states += played.states;
    whole += static_cast<std::size_t>(played.whole);
  }
  if (budget.left() == 0) {
    EXPECT_EQ(whole, scenarios().size());
  }
  std::cout << states << " states; " << whole << " of " << scenarios().size() << " scenarios whole\n";
}

// spec: N7 global reference counting: every order of deliveries, for two and three workers
TEST(RRefProtocol, EveryOrder) { play_all_scenarios({}, 60); }

// spec: N7 global reference counting: every order, with messages delivered twice
TEST(RRefProtocol, EveryOrderWithDuplicates) { play_all_scenarios({.duplicates = 2}, 0.1); }

// spec: N7 global reference counting: every order, where a call fails that had arrived, arrives later, or never
TEST(RRefProtocol, EveryOrderWithFailedCalls) { play_all_scenarios({.duplicates = 1, .losses = 1}, 0.1); }

// spec: N7 global reference counting: every order, where the owner, a user or a parent dies at any moment
TEST(RRefProtocol, EveryOrderWithADeath) { play_all_scenarios({.deaths = 1}, 0.1); }

// spec: N7 global reference counting: every order, with a death, a failed call and a second delivery
TEST(RRefProtocol, EveryOrderWithAllFaults) { play_all_scenarios({.duplicates = 1, .losses = 1, .deaths = 1}, 0.1); }

// ---- as seeds say ----

// Two to six workers that make, pass on and let go at random, over a wire that delays, reorders, loses attempts and their acknowledgements.
// What travels alone is sent again until acknowledged; calls are tried again too, and given up at times.
class SeededJob {
 public:
  SeededJob(std::uint64_t seed, bool deaths) : random_(seed), workers_(2 + pick(5)), deaths_(deaths ? 1 + pick(2) : 0) {
    for (int worker = 0; worker < workers_; ++worker) ledgers_.emplace_back(worker);
    alive_.assign(static_cast<std::size_t>(workers_), true);
    held_.resize(static_cast<std::size_t>(workers_));
  }

  // What went wrong; nothing in good order.
  std::string play() {
    const int steps = 40 + pick(160);
    for (int step = 0; step < steps && trouble_.empty(); ++step) {
      act();
      if (deaths_ > 0 && pick(60) == 0) kill();
      for (int event = pick(4); event > 0; --event) advance();
    }
    for (int worker = 0; worker < workers_; ++worker) {
      if (!lives(worker)) continue;
      auto& held = held_[static_cast<std::size_t>(worker)];
      std::shuffle(held.begin(), held.end(), random_);
      draining_ = true;
      while (!held.empty()) drop(worker, held.size() - 1);
    }
    for (std::size_t events = 0; trouble_.empty() && events < 200'000; ++events) {
      if (!advance() && !resend_all()) break;
    }
    for (int worker = 0; worker < workers_ && trouble_.empty(); ++worker) {
      const RRefLedger& ledger = ledgers_[static_cast<std::size_t>(worker)];
      if (lives(worker) && !ledger.empty()) trouble_ = "something is left: " + ledger.text();
    }
    return trouble_;
  }
  int values() const { return values_; }

 private:
  struct Attempt {
    RRefMessage message;
    bool is_death = false;
  };
  struct Held {
    RRefReference reference;
    bool failed = false;
  };

  int pick(int below) { return static_cast<int>(random_() % static_cast<std::uint64_t>(below)); }
  bool lives(int worker) const { return alive_[static_cast<std::size_t>(worker)]; }
  RRefLedger& ledger(int worker) { return ledgers_[static_cast<std::size_t>(worker)]; }
  static bool in_a_call(const RRefMessage& message) { return message.kind == Kind::create || message.kind == Kind::fork; }

  void act() {
    const int worker = pick(workers_), other = pick(workers_);
    if (!lives(worker)) return;
    auto& held = held_[static_cast<std::size_t>(worker)];
    const int what = pick(10);
    if (what < 2 || held.empty()) {
      ++values_;
      if (worker == other) {
        held.push_back({ledger(worker).create_here()});
      } else if (auto made = ledger(worker).create_at(other); made.ok()) {
        held.push_back({made->reference});
        put(made->message);
      }
    } else if (what < 7) {
      const Held& chosen = held[static_cast<std::size_t>(pick(static_cast<int>(held.size())))];
      if (auto message = ledger(worker).fork(chosen.reference, other); message.ok()) {
        put(*message);
      } else if (!faults_) {
        trouble_ = message.status().message();
      }
    } else {
      drop(worker, static_cast<std::size_t>(pick(static_cast<int>(held.size()))));
    }
    follow(worker);
  }

  void drop(int worker, std::size_t index) {
    auto& held = held_[static_cast<std::size_t>(worker)];
    const RRefReference reference = held[index].reference;
    held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
    ledger(worker).drop(reference);
    follow(worker);
  }

  void kill() {
    const int worker = pick(workers_);
    if (!lives(worker)) return;
    --deaths_;
    faults_ = true;
    alive_[static_cast<std::size_t>(worker)] = false;
    held_[static_cast<std::size_t>(worker)].clear();
    for (int by = 0; by < workers_; ++by) {
      if (!lives(by)) continue;
      RRefMessage notice;
      notice.from = worker;
      notice.to = by;
      wire_.push_back({notice, true});
    }
  }

  void put(const RRefMessage& message) {
    wire_.push_back({message});
    if (pick(8) == 0) wire_.push_back({message});
  }

  // One thing on the wire comes, or one attempt is lost.
  bool advance() {
    if (wire_.empty()) return false;
    const auto index = static_cast<std::size_t>(pick(static_cast<int>(wire_.size())));
    const Attempt attempt = wire_[index];
    wire_[index] = wire_.back();
    wire_.pop_back();
    const RRefMessage& message = attempt.message;
    if (!lives(message.to)) return true;
    if (attempt.is_death) {
      ledger(message.to).worker_died(message.from, Status(Code::peer_failed, "died", {message.from}));
      follow(message.to);
      return true;
    }
    if (pick(10) == 0) {  // this attempt is lost, or has come and its acknowledgement is lost
      if (pick(2) == 0) deliver(message);
      retry(message);
      return true;
    }
    deliver(message);
    if (lives(message.from)) ledger(message.from).acknowledged(message.to, message.number);
    return true;
  }

  void retry(const RRefMessage& message) {
    if (!lives(message.from)) return;
    if (in_a_call(message) && pick(3) == 0) {
      faults_ = true;
      ledger(message.from).lost(message);
      follow(message.from);
    } else if (in_a_call(message)) {
      wire_.push_back({message});
    }
  }

  bool resend_all() {
    bool any = false;
    for (int worker = 0; worker < workers_; ++worker) {
      if (!lives(worker)) continue;
      ledger(worker).resend();
      follow(worker);
    }
    any = !wire_.empty();
    return any;
  }

  void deliver(const RRefMessage& message) {
    auto received = ledger(message.to).receive(message);
    if (!received.ok()) {
      trouble_ = received.status().message();
      return;
    }
    if (*received && draining_) {
      ledger(message.to).drop((*received)->reference);
    } else if (*received) {
      held_[static_cast<std::size_t>(message.to)].push_back({(*received)->reference, !(*received)->status.ok()});
    }
    follow(message.to);
  }

  void follow(int worker) {
    const RRefEffects effects = ledger(worker).take_effects();
    for (const RRefMessage& message : effects.send) put(message);
    for (const auto& [reference, status] : effects.failed) {
      if (!faults_) trouble_ = "a reference failed: " + status.message();
      for (Held& held : held_[static_cast<std::size_t>(worker)]) {
        if (held.reference == reference) held.failed = true;
      }
    }
    for (const RRefId& rref : effects.drop) {
      for (int holder = 0; holder < workers_; ++holder) {
        for (const Held& held : held_[static_cast<std::size_t>(holder)]) {
          if (held.reference.rref != rref || held.failed || !lives(holder)) continue;
          if (!faults_ || ledger(holder).confirmed(held.reference))
            trouble_ = "dropped while worker " + std::to_string(holder) + " held it";
        }
      }
    }
  }

  std::mt19937_64 random_;
  int workers_;
  int deaths_;
  int values_ = 0;
  bool faults_ = false, draining_ = false;
  std::vector<RRefLedger> ledgers_;
  std::vector<bool> alive_;
  std::vector<std::vector<Held>> held_;
  std::vector<Attempt> wire_;
  std::string trouble_;
};

void play_seeds(bool deaths) {
  const int seeds = testing::test_rounds(300, 10'000);
  int values = 0;
  for (int round = 0; round < seeds; ++round) {
    const std::uint64_t seed = testing::test_seed() + static_cast<std::uint64_t>(round);
    SeededJob job(seed, deaths);
    ASSERT_EQ(job.play(), "") << "MUSTER_TEST_SEED=" << seed;
    values += job.values();
  }
  EXPECT_GT(values, seeds);
}

// spec: N7 global reference counting: seeds with delay, reordering, lost attempts and second deliveries: no leak, no early free
TEST(RRefProtocol, Seeds) { play_seeds(false); }

// spec: N7 global reference counting: the same seeds, where one or two workers die
TEST(RRefProtocol, SeedsWithDeaths) { play_seeds(true); }

// ---- single rules ----

RRefMessage only(const RRefEffects& effects) {
  EXPECT_EQ(effects.send.size(), 1U);
  return effects.send.empty() ? RRefMessage() : effects.send.front();
}

// spec: N7 confirmed_by_owner: false until the owner has answered, true on the owner always
TEST(RRefProtocol, ConfirmedByOwner) {
  RRefLedger caller(0), owner(1);
  const auto made = caller.create_at(1);
  ASSERT_TRUE(made.ok());
  EXPECT_FALSE(caller.confirmed(made->reference));
  const auto received = owner.receive(made->message);
  ASSERT_TRUE(received.ok() && received->has_value());
  EXPECT_TRUE(owner.confirmed((*received)->reference));
  const RRefMessage confirm = only(owner.take_effects());
  EXPECT_TRUE(caller.receive(confirm).ok());
  EXPECT_TRUE(caller.confirmed(made->reference));
  EXPECT_EQ(caller.take_effects().confirmed.size(), 1U);
}

// spec: N7 the owner's death fails what refers to it by name, and later uses of it
TEST(RRefProtocol, TheOwnersDeathIsNamed) {
  RRefLedger caller(0);
  const auto made = caller.create_at(1);
  ASSERT_TRUE(made.ok());
  caller.worker_died(1, Status(Code::peer_failed, "worker 'ps' (rank 1) died", {1}));
  const RRefEffects effects = caller.take_effects();
  ASSERT_EQ(effects.failed.size(), 1U);
  EXPECT_NE(effects.failed[0].second.message().find("'ps'"), std::string::npos);
  EXPECT_TRUE(effects.send.empty());
  EXPECT_FALSE(caller.fork(made->reference, 2).ok());
  EXPECT_FALSE(caller.create_at(1).ok());
  caller.drop(made->reference);
  EXPECT_TRUE(caller.empty());
}

// spec: N4 graceful shutdown names the worker it waits for: those whose references keep values alive
TEST(RRefProtocol, SaysWhomItWaitsFor) {
  RRefLedger owner(1), user(2);
  const RRefReference value = owner.create_here();
  const auto passed = owner.fork(value, 2);
  owner.drop(value);
  EXPECT_EQ(owner.waiting_for(), std::set<std::int32_t>{2});
  ASSERT_TRUE(user.receive(*passed).ok());
  user.drop_forks();
  EXPECT_TRUE(owner.receive(only(user.take_effects())).ok());
  EXPECT_EQ(owner.take_effects().drop.size(), 1U);
  EXPECT_TRUE(owner.waiting_for().empty());
}

// spec: N4 graceful shutdown drains references that were passed on in an answer that nobody read
TEST(RRefProtocol, AnswersThatNobodyRead) {
  RRefLedger owner(0), user(1), other(2);
  const auto given = owner.fork(owner.create_here(), 1);
  const auto held = user.receive(*given);
  ASSERT_TRUE(user.fork((*held)->reference, 2).ok());  // never comes
  user.drop_forks();
  EXPECT_FALSE(user.forks_settled());
  user.withdraw_passed_on();
  const RRefMessage withdrawal = only(user.take_effects());
  ASSERT_TRUE(other.receive(withdrawal).ok());
  user.acknowledged(2, withdrawal.number);
  ASSERT_TRUE(user.receive(only(other.take_effects())).ok());
  const RRefMessage release = only(user.take_effects());
  EXPECT_EQ(release.kind, Kind::release);
  user.acknowledged(0, release.number);
  EXPECT_TRUE(user.forks_settled());
  user.withdraw_passed_on();
  EXPECT_TRUE(user.take_effects().send.empty());
}

// spec: N7 messages that make no sense are refused and change nothing
TEST(RRefProtocol, RefusesNonsense) {
  RRefLedger owner(1);
  const RRefReference value = owner.create_here();
  const auto good = owner.fork(value, 2);
  ASSERT_TRUE(good.ok());
  owner.take_effects();
  const std::string before = owner.text();
  RRefMessage release;
  release.from = 2;
  release.to = 1;
  release.number = 1;
  release.kind = Kind::release;
  release.rref = value.rref;
  release.fork = good->fork;
  for (auto spoil :
       {+[](RRefMessage& m) { m.to = 3; }, +[](RRefMessage& m) { m.number = 0; }, +[](RRefMessage& m) { m.fork.holder = 3; },
        +[](RRefMessage& m) { m.rref.owner = 2; }, +[](RRefMessage& m) { m.kind = Kind::withdraw, m.withdrawn = Kind::release; },
        +[](RRefMessage& m) { m.kind = Kind::create; }}) {
    RRefMessage spoiled = release;
    spoil(spoiled);
    const auto answer = owner.receive(spoiled);
    EXPECT_EQ(answer.status().code(), Code::refused);
    EXPECT_EQ(owner.text(), before);
  }
  EXPECT_TRUE(owner.receive(release).ok());

  const std::string bytes = encode(release);
  EXPECT_EQ(*decode_rref_message(bytes), release);
  for (std::size_t length = 0; length < bytes.size(); ++length) EXPECT_FALSE(decode_rref_message(bytes.substr(0, length)).ok());
  EXPECT_FALSE(decode_rref_message(bytes + "x").ok());
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::string changed = bytes;
    changed[at] = static_cast<char>(0xee);
    if (const auto decoded = decode_rref_message(changed); decoded.ok()) {
      RRefLedger(1).receive(*decoded).ok() ? void() : void();  // any answer, but no crash
    }
  }
}

// Memory stays flat: thousands of references leave nothing behind.
TEST(RRefProtocol, NothingGrows) {
  RRefLedger caller(0), owner(1);
  std::string after_some;
  for (int round = 0; round < 20'000; ++round) {
    auto made = caller.create_at(1);
    auto received = owner.receive(made->message);
    owner.drop((*received)->reference);
    caller.drop(made->reference);
    for (int hop = 0; hop < 3; ++hop) {
      for (const RRefMessage& message : owner.take_effects().send) {
        ASSERT_TRUE(caller.receive(message).ok());
        owner.acknowledged(0, message.number);
      }
      for (const RRefMessage& message : caller.take_effects().send) {
        ASSERT_TRUE(owner.receive(message).ok());
        caller.acknowledged(1, message.number);
      }
    }
  }
  EXPECT_TRUE(caller.empty());
  EXPECT_TRUE(owner.empty());
  EXPECT_LT(caller.text().size() + owner.text().size(), 400U);
}

}  // namespace
}  // namespace muster::rpc
