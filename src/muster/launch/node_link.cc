#include "muster/launch/node_link.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "muster/base/bytes.h"
#include "muster/base/socket_address.h"
#include "muster/base/thread_start.h"

namespace muster::launch {
namespace {

enum class Kind : std::uint8_t { alive = 1, failed, ended, stop };

std::string message(Kind kind, int node, int exit_code = 0, const std::string& text = {}) {
  ByteWriter writer;
  writer.put(kind).put(std::int32_t{node}).put(std::int32_t{exit_code}).put_text(text);
  return writer.take();
}

}  // namespace

Result<std::unique_ptr<NodeLink>> NodeLink::open(const NodeJob& job, const NodeLinkLimits& limits) {
  std::unique_ptr<NodeLink> link(new NodeLink(job, limits));
  auto own = job.store->clone();
  if (!own) return own.status();
  link->own_ = *own;
  link->own_->set_timeout(limits.tell);
  link->job_.store->set_timeout(limits.tell);
  link->event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!link->event_) return Status(Code::exhausted, "no event descriptor: " + errno_text(errno));
  if (job.hosts_store) {
    for (int node = 0; node < static_cast<int>(job.nodes.size()); ++node) {
      if (node != job.node) link->heard_[node] = steady_clock().now();
    }
  }
  auto thread = start_thread(
      "the thread that speaks with the other nodes", [raw = link.get()] { raw->run(); },
      Signals::inherited);
  if (!thread.ok()) return thread.status();
  link->thread_ = std::move(*thread);
  return link;
}

NodeLink::~NodeLink() {
  stop_ = true;
  // Wakes the thread; where the store has gone it has ended already.
  if (!store_gone_) (void)job_.store->queue_push(inbox(job_.node), message(Kind::stop, job_.node));
  if (thread_.joinable()) thread_.join();
}

void NodeLink::give(AgentEvent event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t told = ::write(event_.get(), &one, sizeof one);
}

std::vector<AgentEvent> NodeLink::take() {
  const std::lock_guard lock(mutex_);
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof count);
  return std::exchange(events_, {});
}

void NodeLink::run() {
  TimePoint answered = steady_clock().now();
  while (!stop_) {
    auto got = own_->queue_pop(inbox(job_.node), true, limits_.beat);
    if (stop_) return;
    if (got) {
      receive(*got);
    } else if (got.status().code() != Code::timed_out) {
      return lose_store("is gone: " + got.status().message());
    }
    check_silence();
    if (job_.hosts_store) continue;
    // The one that serves the store hears that we live, and its answer says that it does: a machine
    // that has vanished closes nothing.
    const Status told =
        got ? Status() : own_->queue_push(inbox(job_.host_node), message(Kind::alive, job_.node));
    if (told) answered = steady_clock().now();
    if (stop_) return;
    if (steady_clock().now() - answered < limits_.silence) continue;
    return lose_store("has not answered for " + muster::describe(limits_.silence) +
                      "; that node's machine may hang, have lost its power or its network");
  }
}

void NodeLink::lose_store(const std::string& why) {
  store_gone_ = true;
  give(NodeFailed{1, "the job's store at " + job_.master_addr + ":" +
                         std::to_string(job_.master_port) +
                         (job_.hosts_store ? ", which this node's agent serves, "
                                           : ", which another node's agent serves, ") +
                         why});
}

void NodeLink::receive(const std::string& record) {
  ByteReader reader(record);
  const auto kind = reader.get<Kind>();
  const int node = reader.get<std::int32_t>();
  const int exit_code = reader.get<std::int32_t>();
  const std::string text(reader.get_text());
  if (!reader.at_end()) return;
  if (auto known = heard_.find(node); known != heard_.end()) known->second = steady_clock().now();
  if (kind == Kind::failed) give(NodeFailed{exit_code, text});
  if (kind == Kind::ended && heard_.erase(node) == 1) give(NodeEnded{});
}

void NodeLink::check_silence() {
  const TimePoint now = steady_clock().now();
  for (auto node = heard_.begin(); node != heard_.end();) {
    if (now - node->second < limits_.silence) {
      ++node;
      continue;
    }
    const std::string& host = job_.nodes[static_cast<std::size_t>(node->first)].host;
    give(NodeFailed{1, "node " + std::to_string(node->first) + " (" + host +
                           ") has said nothing for " + muster::describe(limits_.silence)});
    give(NodeEnded{});
    node = heard_.erase(node);
  }
}

void NodeLink::tell_failed(int exit_code, const std::string& text) {
  for (int node = 0; !store_gone_ && node < static_cast<int>(job_.nodes.size()); ++node) {
    if (node != job_.node &&
        !job_.store->queue_push(inbox(node), message(Kind::failed, job_.node, exit_code, text)))
      return;
  }
}

void NodeLink::tell_ended() {
  if (!job_.hosts_store && !store_gone_)
    (void)job_.store->queue_push(inbox(job_.host_node), message(Kind::ended, job_.node));
}

}  // namespace muster::launch
