#include "muster/launch/node_membership.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "muster/base/bytes.h"
#include "muster/base/log.h"
#include "muster/base/socket_address.h"
#include "muster/base/thread_start.h"

namespace muster::launch {
namespace {

using membership::JobState;
using membership::NodePhase;

constexpr std::size_t kFailuresTold = 8;
constexpr int kSilences = 2;  // check for changes at least every two lifetimes of a lease

}  // namespace

std::string encode(const NodeDetails& details) {
  ByteWriter writer;
  writer.put_text(encode(details.facts))
      .put_text(details.launcher)
      .put_text(details.program_addr)
      .put(details.program_port)
      .put_text(details.store_addr)
      .put(details.store_port)
      .put(static_cast<std::uint32_t>(details.failures.size()));
  for (const FailureNote& note : details.failures)
    writer.put(note.epoch).put(note.order).put_text(note.text);
  return writer.take();
}

Result<NodeDetails> decode_node_details(const std::string& record) {
  ByteReader reader(record);
  NodeDetails details;
  auto facts = decode_node_facts(std::string(reader.get_text()));
  if (!facts) return facts.status();
  details.facts = std::move(*facts);
  details.launcher = reader.get_text();
  details.program_addr = reader.get_text();
  details.program_port = reader.get<std::uint16_t>();
  details.store_addr = reader.get_text();
  details.store_port = reader.get<std::uint16_t>();
  const auto count = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    FailureNote note;
    note.epoch = reader.get<std::int64_t>();
    note.order = reader.get<std::int64_t>();
    note.text = reader.get_text();
    if (reader.ok()) details.failures.push_back(std::move(note));
  }
  if (reader.at_end()) return details;
  return Status(Code::mismatch,
                "a node described itself in a form that this version does not know; run the same "
                "muster on all nodes");
}

NodeMembership::NodeMembership(std::unique_ptr<membership::Membership> membership,
                               NodeMembershipOptions options, NodeDetails details)
    : options_(std::move(options)),
      membership_(std::move(membership)),
      details_(std::move(details)) {
  report_.wanted_slot = options_.wanted_slot;
  report_.host = details_.facts.host;
  report_.details = encode(details_);
}

Result<std::unique_ptr<NodeMembership>> NodeMembership::join(
    std::unique_ptr<membership::Membership> membership, NodeMembershipOptions options,
    NodeDetails details) {
  std::unique_ptr<NodeMembership> node(
      new NodeMembership(std::move(membership), std::move(options), std::move(details)));
  node->event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!node->event_) return Status(Code::exhausted, "no event descriptor: " + errno_text(errno));
  if (Status taken = node->take_place(); !taken) return taken;
  auto watch = node->membership_->watch("");
  if (!watch) return watch.status();
  node->watch_ = std::move(*watch);
  auto thread =
      start_thread("the thread that follows the job's nodes", [raw = node.get()] { raw->run(); });
  if (!thread.ok()) return thread.status();
  node->thread_ = std::move(*thread);
  return node;
}

NodeMembership::~NodeMembership() {
  stop_ = true;
  if (watch_) watch_->close();
  if (thread_.joinable()) thread_.join();
}

Status NodeMembership::take_place() {
  const std::lock_guard lock(mutex_);
  auto hold = membership_->hold(options_.name, membership::encode(report_), options_.ttl);
  if (hold) {
    hold_ = std::move(*hold);
    return {};
  }
  return hold.status().code() == Code::refused ? describe_holder(hold.status()) : hold.status();
}

Status NodeMembership::describe_holder(const Status& refused) {
  std::string holder = "another launcher";
  if (auto watch = membership_->watch(options_.name); watch) {
    const auto update = (*watch)->next(options_.ttl);
    for (const membership::Change& change :
         update ? update->changes : std::vector<membership::Change>()) {
      if (change.name != options_.name || !change.value) continue;
      const auto report = membership::decode_report(*change.value);
      const auto details = report ? decode_node_details(report->details) : report.status();
      if (details) holder = details->launcher;
    }
  }
  if (options_.wanted_slot < 0) return refused;
  return Status(Code::invalid_argument,
                "node rank " + std::to_string(options_.wanted_slot) + " is taken already, by " +
                    holder +
                    "; every node of the job needs a --node-rank of its own (and every job a "
                    "--rdzv-id of its own)");
}

void NodeMembership::give(NodeNews news) {
  const std::lock_guard lock(mutex_);
  news_.push_back(std::move(news));
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t told = ::write(event_.get(), &one, sizeof one);
}

std::vector<NodeNews> NodeMembership::take() {
  const std::lock_guard lock(mutex_);
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof count);
  return std::exchange(news_, {});
}

/// Under the lock. The thread notices if the lease is lost.
void NodeMembership::publish() {
  report_.details = encode(details_);
  if (hold_) (void)hold_->set(membership::encode(report_));
}

void NodeMembership::report(NodePhase phase, std::int64_t epoch, int exit_code,
                            const std::string& reason, bool killed) {
  const std::lock_guard lock(mutex_);
  report_.phase = phase;
  report_.killed = killed;
  report_.epoch = epoch;
  report_.exit_code = exit_code;
  report_.reason = reason;
  publish();
}

void NodeMembership::set_program_port(std::uint16_t port) {
  const std::lock_guard lock(mutex_);
  details_.program_port = port;
  publish();
}

void NodeMembership::add_failure(const FailureNote& note) {
  const std::lock_guard lock(mutex_);
  details_.failures.push_back(note);
  if (details_.failures.size() > kFailuresTold) details_.failures.erase(details_.failures.begin());
}

void NodeMembership::run() {
  while (!stop_) {
    const Duration longest = kSilences * options_.ttl;
    const TimePoint now = steady_clock().now();
    const Duration timeout = ask_again_ == TimePoint::max()
                                 ? longest
                                 : std::clamp<Duration>(ask_again_ - now, Duration(0), longest);
    auto update = watch_->next(timeout);
    if (stop_) return;
    if (!update) {
      // After the end of the job the service may end at any time.
      if (over_) return give({AgentEvent(OthersGone{}), {}, {}});
      over_ = true;
      give({AgentEvent(
                JobEnded{false, 1, options_.place + " is gone: " + update.status().message()}),
            {},
            {},
            0,
            true});
      return give({AgentEvent(OthersGone{}), {}, {}});
    }
    if (!follow(*update)) return;
  }
}

/// Returns false if there is nothing more to follow.
bool NodeMembership::follow(const membership::Update& update) {
  NodeNews news;
  for (const membership::Change& change : update.changes) {
    if (!change.value || change.name == options_.name) continue;
    const auto report = membership::decode_report(*change.value);
    const auto details = report ? decode_node_details(report->details) : report.status();
    if (!details) continue;
    std::int64_t& seen = failures_seen_[change.name];
    for (const FailureNote& note : details->failures) {
      if (note.order <= seen) continue;
      seen = note.order;
      news.failures.push_back(note);
    }
  }
  view_.apply(update, steady_clock().now());
  if (!news.failures.empty()) give(std::move(news));
  follow_epoch();
  follow_arrivals();
  if (over_) {
    const auto& nodes = view_.nodes();
    const bool alone = nodes.empty() || (nodes.size() == 1 && nodes.contains(options_.name));
    if (alone) give({AgentEvent(OthersGone{}), {}, {}});
    return !alone;
  }
  if (!keep_place()) return false;
  decide();
  return true;
}

void NodeMembership::follow_epoch() {
  const membership::Epoch& epoch = view_.epoch();
  if (epoch.number <= followed_ || over_) return;
  const bool first = followed_ == 0;
  followed_ = epoch.number;
  if (epoch.state != JobState::running) {
    over_ = true;
    const bool succeeded = epoch.state == JobState::succeeded;
    if (first && succeeded)
      return give({AgentEvent(JobEnded{false, 1,
                                       "the job \"" + options_.job +
                                           "\" had ended already, and well; start another one with "
                                           "an --rdzv-id of its own"}),
                   {},
                   {}});
    return give({AgentEvent(JobEnded{succeeded, epoch.exit_code, epoch.reason}), {}, {}});
  }
  auto plan = std::make_shared<EpochPlan>();
  plan->epoch = epoch;
  for (const membership::Member& member : epoch.members) {
    const auto report = membership::decode_report(member.value);
    auto details = report ? decode_node_details(report->details) : report.status();
    const bool own = member.name == options_.name;
    if (const int workers = details_.facts.workers;
        details && own && details->facts.workers != workers)
      details = Status(Code::mismatch,
                       "epoch " + std::to_string(epoch.number) + " of the job has " +
                           std::to_string(details->facts.workers) +
                           " workers on this node, which starts " + std::to_string(workers));
    if (!details) {
      over_ = true;
      return give({AgentEvent(JobEnded{false, 1, details.status().message()}), {}, {}});
    }
    if (own) {
      plan->node = static_cast<int>(plan->nodes.size());
      plan->slot = member.slot;
    }
    plan->nodes.push_back(std::move(*details));
  }
  give({AgentEvent(NewEpoch{epoch.number, plan->node >= 0}), plan, {}});
}

void NodeMembership::follow_arrivals() {
  const std::int64_t number = view_.epoch().number;
  if (over_ || number == complete_ || view_.arrived() < view_.seats().size()) return;
  if (!view_.lost().empty()) return;  // the next epoch is about to begin
  complete_ = number;
  give({{}, {}, {}, number});
}

/// If the lease was lost, the others go on without this node: its workers end, and it joins again
/// as a new node.
bool NodeMembership::keep_place() {
  Status lost;
  {
    const std::lock_guard lock(mutex_);
    lost = hold_->state();
    if (lost.ok()) return true;
    hold_.reset();
    report_.phase = NodePhase::waiting;
    report_.epoch = 0;
  }
  log(LogLevel::warning,
      "this node has lost its place in the job, and asks for another: " + lost.message());
  give({AgentEvent(NewEpoch{std::max<std::int64_t>(followed_, 1), false}), {}, {}});
  const Status taken = take_place();
  if (taken) return true;
  over_ = true;
  give({AgentEvent(JobEnded{false, 1, "this node's place in the job is lost: " + taken.message()}),
        {},
        {},
        0,
        true});
  give({AgentEvent(OthersGone{}), {}, {}});
  return false;
}

void NodeMembership::decide() {
  ask_again_ = TimePoint::max();
  // A node that stops sees to it that the job ends: there may be no member left to propose it.
  const auto own = view_.nodes().find(options_.name);
  const bool stops = own != view_.nodes().end() && own->second.report.phase == NodePhase::stopped;
  if (!stops && view_.proposer() != options_.name) return;
  const membership::Decision decision =
      membership::next_epoch(steady_clock().now(), view_, options_.epochs);
  ask_again_ = decision.again;
  if (!decision.commit) return;
  const membership::Epoch epoch = membership::make_epoch(view_, decision);
  const auto committed = membership_->commit(epoch, view_.epoch_revision());
  // Refused: another node committed first, and the watch will report its epoch.
  if (!committed && committed.status().code() != Code::refused)
    log(LogLevel::warning, "committing epoch " + std::to_string(epoch.number) +
                               " of the job: " + committed.status().message());
}

}  // namespace muster::launch
