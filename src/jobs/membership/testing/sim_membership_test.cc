// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/testing/sim_membership.h"

#include <algorithm>
#include <functional>

namespace muster::membership::testing {
namespace {

constexpr std::string_view kRecord = "epoch";
constexpr int kBeatsInTtl = 5;

std::string incarnation_of(const Member& member) {
  return decode_report(member.value).value().incarnation;
}

}  // namespace

SimMembership::SimMembership(const SimNodeOptions& options)
    : options_(options), random_(options.seed) {}

void SimMembership::at(TimePoint when, std::function<void()> body) {
  events_.push({when, ++order_, std::move(body)});
}

Duration SimMembership::delay() {
  const auto spread = static_cast<std::uint64_t>((options_.max_delay - options_.min_delay).count());
  return options_.min_delay + Duration(static_cast<std::int64_t>(random_() % (spread + 1)));
}

// A message sent while the node is cut off, or due to arrive then, is lost: the connection has
// broken.
void SimMembership::send(int number, std::function<void(Node&)> body) {
  const Node& sender = nodes_.at(number);
  if (!sender.alive || sender.cut_off) return;
  at(now_ + delay(), [this, number, life = sender.life, body = std::move(body)] {
    by(number, [this, number, life, body] {
      Node& node = nodes_.at(number);
      if (node.alive && !node.cut_off && node.life == life) body(node);
    });
  });
}

/// Now, or when the node goes on.
void SimMembership::by(int number, std::function<void()> body) {
  Node& node = nodes_.at(number);
  if (node.stopped)
    node.behind.push_back(std::move(body));
  else
    body();
}

void SimMembership::ask(const store::Request& request, std::function<void(store::Reply)> answer) {
  if (silent_) {
    // A request only names its bytes, which are the asker's.
    const std::vector<std::string> keys(request.keys.begin(), request.keys.end());
    const std::vector<std::string> values(request.values.begin(), request.values.end());
    unheard_.emplace_back(
        [this, late = request, keys, values, answer = std::move(answer)]() mutable {
          late.keys.assign(keys.begin(), keys.end());
          late.values.assign(values.begin(), values.end());
          ask(late, answer);
        });
    return;
  }
  const store::Ticket ticket = next_ticket_++;
  asked_[ticket] = std::move(answer);
  store::Answers answers;
  service_.submit(ticket, request, now_, answers);
  serve(answers);
}

void SimMembership::serve(store::Answers& answers) {
  for (auto& each : answers) {
    const auto asker = asked_.find(each.ticket);
    if (asker == asked_.end()) continue;
    const auto answer = std::move(asker->second);
    asked_.erase(asker);
    if (!answer) continue;
    if (silent_)
      unheard_.emplace_back([answer, reply = std::move(each.reply)] { answer(reply); });
    else
      answer(std::move(each.reply));
  }
}

void SimMembership::answer_again() {
  silent_ = false;
  for (const auto& each : std::exchange(unheard_, {})) each();
}

/// As `KeptPlace::others_return_until`.
TimePoint SimMembership::returning(const Node& node) const {
  if (now_ - node.heard >= options_.ttl / 2) return now_ + options_.ttl / 8;
  return node.back == TimePoint{} ? node.back : node.back + options_.ttl;
}

int SimMembership::start(const std::string& host) {
  const int number = next_node_++;
  Node& node = nodes_[number];
  node.number = number;
  node.host = host;
  node.name = "node/" + std::to_string(number);
  node.report = NodeReport{.host = host, .incarnation = node.name};
  join(node);
  return number;
}

void SimMembership::join(Node& node) {
  ++node.life;
  node.asked_again = TimePoint::max();
  send(node.number, [this](Node& there) {
    const std::string value = encode(there.report);
    ask({.op = store::StoreOp::hold,
         .timeout = options_.ttl,
         .keys = {there.name},
         .values = {value}},
        [this, number = there.number, value](store::Reply reply) {
          Node& held = nodes_.at(number);
          if (!reply.status) {  // the service has not let go of the life before
            at(now_ + options_.ttl, [this, number, life = held.life] {
              Node& again = nodes_.at(number);
              if (again.alive && !again.cut_off && again.life == life) join(again);
            });
            return;
          }
          held.lease = reply.number;
          held.heard = now_;
          if (held.life > 1) held.back = now_;
          const store::Ticket ticket = next_ticket_++;
          staying_[number] = ticket;
          store::Answers answers;
          service_.submit(ticket,
                          {.op = store::StoreOp::stay, .number = held.lease, .keys = {held.name}},
                          now_, answers);
          serve(answers);
          renew(held);
          watch(held);
          // A report that was sent without a hold did not arrive.
          if (encode(held.report) != value) tell(held);
        });
  });
}

void SimMembership::renew(Node& node) {
  at(now_ + options_.ttl / kBeatsInTtl, [this, number = node.number, life = node.life] {
    by(number, [this, number, life] {
      Node& beating = nodes_.at(number);
      if (!beating.alive || beating.life != life || beating.cut_off) return;
      send(number, [this, sent = now_](Node& there) {
        ask({.op = store::StoreOp::renew,
             .timeout = options_.ttl,
             .number = there.lease,
             .keys = {there.name}},
            [this, number = there.number, life = there.life, sent](const store::Reply& reply) {
              if (nodes_.at(number).life != life) return;
              send(number, [this, sent, kept = reply.status.ok()](Node& told) {
                if (!kept) return take_place_again(told);
                if (now_ - told.heard >= options_.ttl / 2) told.back = now_;
                told.heard = std::max(told.heard, sent);
              });
            });
      });
      renew(beating);
    });
  });
}

Update SimMembership::understand(const store::Reply& reply) const {
  using Kind = store::LeaseNews::Item::Kind;
  const auto news = store::decode_lease_news(*reply.values.at(0));
  Update update{reply.number, news->snapshot, {}, {}, 0};
  for (const auto& item : news->items) {
    if (item.kind == Kind::record) {
      update.epoch = decode_epoch(item.value).value();
      update.epoch_revision = item.revision;
    } else if (item.kind == Kind::held) {
      update.changes.push_back({item.name, item.value, item.revision});
    } else {
      update.changes.push_back({item.name, {}, 0, item.kind == Kind::silent});
    }
  }
  return update;
}

void SimMembership::watch(Node& node) {
  // Asked for at the service, at once: what counts is when the news arrives.
  ask({.op = store::StoreOp::watch,
       .timeout = Duration(-1),
       .number = node.view.revision(),
       .keys = {"node/", kRecord}},
      [this, number = node.number, life = node.life](store::Reply reply) {
        Node& watching = nodes_.at(number);
        if (!watching.alive || watching.life != life || !reply.status) return;
        const Update update = understand(reply);
        send(number, [this, update](Node& there) {
          take(there, update);
          watch(there);
        });
      });
}

void SimMembership::take(Node& node, const Update& update) {
  std::size_t looked_at = node.view.apply(update, now_);
  if (update.epoch) looked_at -= std::min(looked_at, update.epoch->members.size());
  if (!update.snapshot) looked_at_ += looked_at;
  follow(node);
  consider(node);
}

// Acts as a launcher in a new epoch: its workers of the one before end, and new ones start if it
// has a seat.
void SimMembership::follow(Node& node) {
  const Epoch& epoch = node.view.epoch();
  if (epoch.number == node.running || epoch.number == 0) return;
  int slot = -1;
  std::int64_t joined = 0;
  for (const Member& member : epoch.members)
    if (incarnation_of(member) == node.report.incarnation)
      slot = member.slot, joined = member.joined;
  // Also by an epoch without it that it has not seen.
  if (slot < 0 || joined > node.running) end_workers(node);
  if (slot < 0) {
    node.running = 0;
    node.slot = -1;
    if (node.report.phase == NodePhase::waiting) return;
    node.report.phase = NodePhase::waiting;
    node.report.epoch = 0;
    return tell(node);
  }
  if (epoch.number < node.running)
    complaints_.push_back("node " + std::to_string(node.number) + " went back in time");
  node.running = epoch.number;
  node.slot = slot;
  node.report.phase = NodePhase::running;  // which its seat says: it need not tell
  node.report.epoch = epoch.number;
  at(now_ + options_.meeting, [this, number = epoch.number] { meet(number); });
}

/// Parts of a divided state stay with the launcher.
void SimMembership::lose_workers(Node& node) {
  node.commits = 0;
  node.had = {};
  if (!options_.divided) node.report.state_in = 0;
}

/// The node has no seat. Its launcher keeps their last commit, or its parts, which workers that it
/// has later get.
void SimMembership::end_workers(Node& node) {
  node.kept = std::max(node.kept, std::exchange(node.had, {}));
  node.report.kept_in = options_.divided ? node.held.epoch : node.kept.epoch;
  node.commits = node.report.state_in = node.report.none_in = 0;
}

/// In the order of their slots. Empty unless all members' workers live and are in that epoch.
std::vector<SimMembership::Node*> SimMembership::workers_of(const Epoch& epoch) {
  std::vector<Node*> members;
  for (auto& [number, node] : nodes_)
    if (node.alive && node.running == epoch.number && node.report.phase == NodePhase::running)
      members.push_back(&node);
  if (members.size() != epoch.members.size()) members.clear();
  std::ranges::sort(members, {}, &Node::slot);
  return members;
}

/// The newest commit that these have all of; none, if they have only parts of the newest.
SimMembership::Commit SimMembership::newest_of(const std::vector<const Node*>& nodes) const {
  Commit newest;
  for (const Node* node : nodes)
    newest = std::max({newest, options_.divided ? node->held : node->had, node->kept});
  if (!options_.divided) return newest;
  std::set<std::size_t> parts;
  for (const Node* node : nodes)
    if (node->held == newest) parts.insert(node->parts.begin(), node->parts.end());
  return parts.size() == newest.parts ? newest : Commit{};
}

/// Compares what an epoch begins from with what all that live have, members or not.
void SimMembership::count_loss(const Commit& restored) {
  std::vector<const Node*> living;
  for (const auto& [number, node] : nodes_)
    if (node.alive) living.push_back(&node);
  const Commit newest = newest_of(living);
  if (newest > restored && newest.epoch >= began_)
    lost_commits_ += std::max<std::int64_t>(newest.number - restored.number, 1);
}

/// All have made, or restored, the commit `committed_`.
void SimMembership::hold_commit(const std::vector<Node*>& members, std::int64_t epoch) {
  const std::size_t size = members.size();
  for (std::size_t i = 0; i < size; ++i) {
    members[i]->commits = committed_;
    members[i]->kept = {};
    members[i]->report.kept_in = 0;
    if (!options_.divided) {
      members[i]->had = committed_ > 0 ? Commit{epoch, committed_, 0} : Commit{};
      continue;
    }
    members[i]->held = committed_ > 0 ? Commit{epoch, committed_, size} : Commit{};
    members[i]->parts.clear();
    if (committed_ > 0) members[i]->parts = {i, (i + size - 1) % size};
  }
}

/// Whether some of them cannot reach each other: then all launchers tell of that.
bool SimMembership::fails(const std::vector<Node*>& members, std::int64_t epoch) {
  if (failed_ >= epoch) return true;
  std::map<int, std::vector<int>> blamed;
  for (const Node* one : members)
    for (const Node* other : members)
      if (cut_links_.contains(std::minmax(one->number, other->number)) && one != other)
        blamed[one->number].push_back(other->slot);
  if (blamed.empty()) return false;
  failed_ = epoch;
  for (const Node* each : members)
    by(each->number, [this, number = each->number, slots = blamed[each->number], epoch] {
      Node& there = nodes_.at(number);
      if (there.running != epoch) return;
      add_trouble(there.report, epoch, slots, "a link was cut", there.commits);
      tell(there);
    });
  return true;
}

/// The exchange of state at the beginning of an epoch, as `StateCommits::from_survivors`.
void SimMembership::meet(std::int64_t epoch) {
  if (met_ >= epoch) return;
  const auto members = workers_of(epochs_.at(static_cast<std::size_t>(epoch) - 1));
  if (members.empty() || fails(members, epoch)) return;
  met_ = epoch;
  const Commit restored = newest_of({members.begin(), members.end()});
  const std::int64_t newest = restored.number;
  count_loss(restored);
  const bool lost = newest == 0 && committed_ > 0;
  if (lost) began_ = epoch;
  committed_ = newest;
  hold_commit(members, epoch);
  for (Node* node : members) {
    if (lost) node->report.lost_in = epoch;
    if (lost) node->report.committed = node->report.state_in = 0;
    if (lost || newest > 0) tell_state(*node, epoch);
  }
  at(now_ + options_.step, [this, epoch] { train(epoch); });
}

void SimMembership::train(std::int64_t epoch) {
  const auto members = workers_of(epochs_.at(static_cast<std::size_t>(epoch) - 1));
  if (members.empty() || fails(members, epoch)) return;
  ++committed_;
  hold_commit(members, epoch);
  for (Node* node : members) tell_state(*node, epoch);
  at(now_ + options_.step, [this, epoch] { train(epoch); });
}

/// Once for each seat, and the first node once for each epoch, as `NodeMembership::note_state`: a
/// launcher that stands still tells later.
void SimMembership::tell_state(Node& node, std::int64_t epoch) {
  by(node.number, [this, number = node.number, epoch] {
    Node& there = nodes_.at(number);
    there.report.committed = there.commits;
    if (there.running != epoch) return;
    if (there.commits > 0) there.view.hear_own_state(epoch, options_.divided);
    const bool lost = there.report.lost_in == epoch && there.commits == 0;
    const auto& seats = there.view.seats();
    const bool first = !seats.empty() && seats.begin()->first == there.slot;
    const bool speaks = first && there.report.state_in < epoch;
    if (there.report.state_in > 0 && !lost && !speaks) return;
    there.report.state_divided = options_.divided;
    if (there.commits > 0) there.report.none_in = 0;
    if (there.commits > 0) there.report.state_in = epoch;
    tell(there);
  });
}

void SimMembership::tell(Node& node) {
  send(node.number, [this](Node& there) {
    const std::string value = encode(there.report);
    ask({.op = store::StoreOp::hold,
         .timeout = options_.ttl,
         .number = there.lease,
         .keys = {there.name},
         .values = {value}},
        {});
  });
}

void SimMembership::consider(Node& node) {
  if (node.view.proposer() != node.name) return;
  const Decision decision = next_epoch(now_, node.view, options_.epochs, returning(node));
  looked_at_ += decision.looked_at;
  if (decision.commit) {
    const Epoch epoch = make_epoch(node.view, decision);
    send(node.number, [this, epoch, expected = node.view.epoch_revision()](Node&) {
      const std::string number = std::to_string(epoch.number), record = encode(epoch);
      ask({.op = store::StoreOp::commit,
           .number = expected,
           .keys = {kRecord},
           .values = {number, record}},
          [this, epoch](store::Reply reply) {
            if (!reply.status) {
              ++refused_commits_;
            } else {
              check(epoch);
              epochs_.push_back(epoch);
            }
          });
    });
  }
  if (decision.again == TimePoint::max() || decision.again == node.asked_again) return;
  node.asked_again = decision.again;
  at(decision.again, [this, number = node.number, life = node.life] {
    by(number, [this, number, life] {
      Node& asked = nodes_.at(number);
      if (!asked.alive || asked.cut_off || asked.life != life) return;
      asked.asked_again = TimePoint::max();
      consider(asked);
    });
  });
}

// Checks the properties of every epoch that is committed, whatever happened.
void SimMembership::check(const Epoch& epoch) {
  const auto complain = [&](const std::string& what) {
    complaints_.push_back("epoch " + std::to_string(epoch.number) + ": " + what);
  };
  if (epoch.number != static_cast<std::int64_t>(epochs_.size()) + 1)
    complain("a number was skipped");
  if (epoch.state != JobState::running) return;
  const auto size = static_cast<int>(epoch.members.size());
  if (size < options_.epochs.min_nodes || size > options_.epochs.max_nodes)
    complain(std::to_string(size) + " members");
  std::map<std::string, int> before;
  if (!epochs_.empty()) {
    for (const Member& member : epochs_.back().members)
      before[incarnation_of(member)] = member.slot;
  }
  std::map<std::string, int> seen;
  for (const Member& member : epoch.members) {
    const std::string node = incarnation_of(member);
    if (!seen.emplace(node, member.slot).second) complain(node + " sits twice");
    if (member.slot >= options_.epochs.max_nodes) complain("a slot beyond the most");
    const auto old = before.find(node);
    if (old != before.end() && old->second != member.slot) complain(node + " lost its slot");
  }
  if (!epochs_.empty() && epoch.restarts < epochs_.back().restarts) complain("restarts were lost");
  if (epoch.restarts > options_.epochs.max_restarts) complain("too many restarts");
}

void SimMembership::kill(int number) {
  Node& node = nodes_.at(number);
  node.alive = false;
  node.running = 0;
  end_workers(node);
  node.held = node.kept = {};
  node.parts.clear();
  ++node.life;
  const auto staying = staying_.find(number);
  if (staying == staying_.end() || node.cut_off) return;
  store::Answers answers;
  service_.drop(staying->second, answers);
  staying_.erase(staying);
  serve(answers);
}

void SimMembership::cut_off(int number) { nodes_.at(number).cut_off = true; }

void SimMembership::heal(int number) {
  Node& node = nodes_.at(number);
  if (!node.alive || !node.cut_off) return;
  node.cut_off = false;
  take_place_again(node);
}

/// Its launcher has noticed that its hold is lost, or does now: it comes under another name, with
/// the workers that it has kept.
void SimMembership::take_place_again(Node& node) {
  node.name += "'";
  staying_.erase(node.number);
  join(node);
}

void SimMembership::cut_link(int one, int other) { cut_links_.insert(std::minmax(one, other)); }

void SimMembership::mend_link(int one, int other) { cut_links_.erase(std::minmax(one, other)); }

void SimMembership::stop(int number) {
  Node& node = nodes_.at(number);
  if (node.alive) node.stopped = true;
}

void SimMembership::go_on(int number) {
  Node& node = nodes_.at(number);
  node.stopped = false;
  node.heard = std::max(node.heard, now_);  // its own absence is not the service's
  for (const auto& body : std::exchange(node.behind, {})) body();
}

void SimMembership::fail(int number) {
  Node& node = nodes_.at(number);
  if (!node.alive || node.running == 0 || node.report.phase != NodePhase::running) return;
  lose_workers(node);
  node.report.phase = NodePhase::failed;
  node.report.epoch = node.running;
  node.report.exit_code = 1;
  node.report.reason = "a worker failed";
  tell(node);
}

void SimMembership::lose_memory(int number) {
  Node& node = nodes_.at(number);
  if (!node.alive || node.running == 0 || node.report.phase != NodePhase::running) return;
  node.held = {};
  node.parts.clear();
  node.report.state_in = 0;
  node.report.none_in = node.running;
  fail(number);
}

void SimMembership::succeed(int number) {
  Node& node = nodes_.at(number);
  if (!node.alive || node.running == 0 || node.report.phase != NodePhase::running) return;
  node.report.phase = NodePhase::succeeded;
  node.report.epoch = node.running;
  tell(node);
}

bool SimMembership::step(TimePoint end) {
  const TimePoint expiry = service_.next_deadline();
  const TimePoint next = events_.empty() ? TimePoint::max() : events_.top().at;
  if (std::min(expiry, next) > end) return false;
  if (expiry <= next) {
    now_ = std::max(now_, expiry);
    store::Answers answers;
    service_.expire(now_, answers);
    serve(answers);
    return true;
  }
  now_ = next;
  const auto body = events_.top().body;
  events_.pop();
  body();
  return true;
}

void SimMembership::run(Duration time) {
  const TimePoint end = now_ + time;
  while (step(end)) {
  }
  now_ = end;
}

}  // namespace muster::membership::testing
