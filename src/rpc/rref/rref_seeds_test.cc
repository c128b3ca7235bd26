// SPDX-License-Identifier: BSD-3-Clause
// Jobs of two to six workers that make, pass on and let go of references as seeds say.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "rpc/rref/rref_protocol.h"
#include "testing/budget.h"
#include "testing/seed.h"

namespace muster::rpc {
namespace {

// Two to six workers that make, pass on and let go at random, over a wire that delays, reorders,
// loses attempts and their acknowledgements. Messages that belong to no call are sent again until
// acknowledged; calls are tried again too, and given up at times.
class SeededJob {
 public:
  SeededJob(std::uint64_t seed, bool deaths)
      : random_(seed), workers_(2 + pick(5)), deaths_(deaths ? 1 + pick(2) : 0) {
    for (int worker = 0; worker < workers_; ++worker) ledgers_.emplace_back(worker);
    alive_.assign(static_cast<std::size_t>(workers_), true);
    held_.resize(static_cast<std::size_t>(workers_));
  }

  // Plays the job and returns its first failure; empty if there is none.
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
  static bool in_a_call(const RRefMessage& message) {
    return message.kind == RRefMessageKind::create || message.kind == RRefMessageKind::fork;
  }

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
      ledger(message.to)
          .worker_died(message.from, Status(Code::peer_failed, "died", {message.from}));
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
      held_[static_cast<std::size_t>(message.to)].push_back(
          {(*received)->reference, !(*received)->status.ok()});
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
  const int seeds = muster::testing::test_rounds(300, 10'000);
  int values = 0;
  for (int round = 0; round < seeds; ++round) {
    const std::uint64_t seed = muster::testing::test_seed() + static_cast<std::uint64_t>(round);
    SeededJob job(seed, deaths);
    ASSERT_EQ(job.play(), "") << "MUSTER_TEST_SEED=" << seed;
    values += job.values();
  }
  EXPECT_GT(values, seeds);
}

// spec: N7 global reference counting: seeds with delay, reordering, lost attempts and second
// deliveries: no leak, no early free
TEST(RRefProtocol, Seeds) { play_seeds(false); }

// spec: N7 global reference counting: the same seeds, where one or two workers die
TEST(RRefProtocol, SeedsWithDeaths) { play_seeds(true); }

}  // namespace
}  // namespace muster::rpc
