// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/testing/sim_membership.h"

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
    Node& node = nodes_.at(number);
    if (node.alive && !node.cut_off && node.life == life) body(node);
  });
}

void SimMembership::ask(const store::Request& request, std::function<void(store::Reply)> answer) {
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
    if (answer) answer(std::move(each.reply));
  }
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
    Node& beating = nodes_.at(number);
    if (!beating.alive || beating.life != life) return;
    if (beating.cut_off) return;
    send(number, [this](Node& there) {
      ask({.op = store::StoreOp::renew,
           .timeout = options_.ttl,
           .number = there.lease,
           .keys = {there.name}},
          {});
    });
    renew(beating);
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
      update.changes.push_back({item.name, {}, 0});
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
  for (const Member& member : epoch.members)
    if (incarnation_of(member) == node.report.incarnation) slot = member.slot;
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
  const Decision decision = next_epoch(now_, node.view, options_.epochs);
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
    Node& asked = nodes_.at(number);
    if (!asked.alive || asked.cut_off || asked.life != life) return;
    asked.asked_again = TimePoint::max();
    consider(asked);
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
  // Its launcher has noticed that its hold is lost, or does now: it comes under another name, with
  // the workers that it has kept.
  node.name += "'";
  staying_.erase(number);
  join(node);
}

void SimMembership::fail(int number) {
  Node& node = nodes_.at(number);
  if (!node.alive || node.running == 0 || node.report.phase != NodePhase::running) return;
  node.report.phase = NodePhase::failed;
  node.report.epoch = node.running;
  node.report.exit_code = 1;
  node.report.reason = "a worker failed";
  tell(node);
}

void SimMembership::succeed(int number) {
  Node& node = nodes_.at(number);
  if (!node.alive || node.running == 0 || node.report.phase != NodePhase::running) return;
  node.report.phase = NodePhase::succeeded;
  node.report.epoch = node.running;
  tell(node);
}

void SimMembership::run(Duration time) {
  const TimePoint end = now_ + time;
  for (;;) {
    const TimePoint expiry = service_.next_deadline();
    const TimePoint next = events_.empty() ? TimePoint::max() : events_.top().at;
    if (std::min(expiry, next) > end) break;
    if (expiry <= next) {
      now_ = std::max(now_, expiry);
      store::Answers answers;
      service_.expire(now_, answers);
      serve(answers);
      continue;
    }
    now_ = next;
    const auto body = events_.top().body;
    events_.pop();
    body();
  }
  now_ = end;
}

}  // namespace muster::membership::testing
