// SPDX-License-Identifier: BSD-3-Clause
/// A worker's fabric with a gate: the thread about to send one selected message blocks there until
/// it is released or its process has been killed. Tests use it to stop a job at any point of a
/// protocol and to observe a death at that point.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/transport/fabric.h"
#include "rpc/rref/rref_context.h"
#include "rpc/wire/message.h"
#include "testing/limits.h"
#include "testing/rank_processes.h"

namespace muster::rpc::testing {

/// A message's label: "call hold", "reply", "create", "fetch", "closing", "register", "confirm".
inline std::string label_of(ConstBytes bytes) {
  const auto head = decode(bytes);
  if (!head.ok()) return "no message";
  if (head->kind == kRRefProtocol) {
    constexpr const char* kNames[kRRefMessageKinds] = {"create", "fork",   "register", "confirm",
                                                       "gone",   "accept", "release",  "withdraw"};
    const auto message = decode_rref_message(head->payload);
    return message.ok() ? kNames[static_cast<std::size_t>(message->kind)] : "no message";
  }
  const std::pair<MessageKind, const char*> kinds[] = {
      {MessageKind::reply, "reply"},   {MessageKind::error, "error"},
      {MessageKind::cancel, "cancel"}, {MessageKind::closing, "closing"},
      {kRRefCreate, "create"},         {kRRefFetch, "fetch"}};
  for (const auto& [kind, label] : kinds) {
    if (head->kind == kind) return label;
  }
  return "call " + std::string(head->name);
}

/// A point in a job: worker `from` is about to send the first message with this label to worker
/// `to`, or, without `to`, to perform the labelled action.
struct GatePoint {
  const char* label;
  int from;
  int to;
};

/// Blocks the thread that reaches `point`. Shared by the processes of a job.
struct Gate {
  static constexpr Duration kLimit = muster::testing::kMustHappen;
  explicit Gate(GatePoint point) : point(point) {}
  virtual ~Gate() = default;

  virtual void pass(const std::string& label, int from, int to) {
    if (label != point.label || from != point.from || to != point.to || passed.exchange(true))
      return;
    reached.add(1);
    open.wait_for(1, kLimit);
  }

  const GatePoint point;
  muster::testing::SharedCounter reached;
  muster::testing::SharedCounter open;
  std::atomic<bool> passed{false};  // one per process
};

class GatedChannel final : public transport::Channel {
 public:
  GatedChannel(transport::Channel& inner, transport::Fabric& fabric, Gate& gate)
      : inner_(inner), fabric_(fabric), gate_(gate) {}

  transport::TransferRef send(int member, std::uint64_t tag, ConstBytes data,
                              const transport::Fingerprint& call) override {
    if (tag == 0) gate_.pass(label_of(data), inner_.rank(), member);
    return inner_.send(member, tag, data, call);
  }
  std::uint32_t id() const override { return inner_.id(); }
  std::span<const int> members() const override { return inner_.members(); }
  int rank() const override { return inner_.rank(); }
  transport::Fabric& fabric() override { return fabric_; }
  transport::TransferRef receive(int member, std::uint64_t tag, MutableBytes data,
                                 const transport::Fingerprint& call, bool exact) override {
    return inner_.receive(member, tag, data, call, exact);
  }
  void cancel(const transport::TransferRef& transfer) override { inner_.cancel(transfer); }
  void begin(const transport::Fingerprint& call) override { inner_.begin(call); }
  void compare(int member, const transport::Fingerprint& call) override {
    inner_.compare(member, call);
  }
  Status failure() const override { return inner_.failure(); }
  void fail(Status cause) override { inner_.fail(std::move(cause)); }
  std::vector<int> awaited() const override { return inner_.awaited(); }

 private:
  transport::Channel& inner_;
  transport::Fabric& fabric_;
  Gate& gate_;
};

/// Forwards to `inner`, except for the channel that calls use.
class GatedFabric final : public transport::Fabric {
 public:
  GatedFabric(std::unique_ptr<transport::Fabric> inner, Gate& gate)
      : inner_(std::move(inner)), agreements_(inner_->agreements(), *this, gate) {}

  transport::Channel& agreements() override { return agreements_; }
  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  int cores() const override { return inner_->cores(); }
  const Clock& clock() const override { return inner_->clock(); }
  std::span<const int> hosts() const override { return inner_->hosts(); }
  shm::HostRegion* region() override { return inner_->region(); }
  transport::Channel& bootstrap() override { return inner_->bootstrap(); }
  Result<std::shared_ptr<transport::Channel>> open(std::uint32_t id,
                                                   std::vector<int> members) override {
    return inner_->open(id, std::move(members));
  }
  std::uint32_t next_channel_id() const override { return inner_->next_channel_id(); }
  bool poll() override { return inner_->poll(); }
  bool wait(const std::function<bool()>& done, TimePoint deadline) override {
    return inner_->wait(done, deadline);
  }
  void wake() override { inner_->wake(); }
  Status death_of(int rank) const override { return inner_->death_of(rank); }
  void declare_dead(int rank, Status evidence) override {
    inner_->declare_dead(rank, std::move(evidence));
  }
  bool threads() const override { return inner_->threads(); }
  transport::Traffic traffic() const override { return inner_->traffic(); }
  void suspend_heartbeats(bool on) override { inner_->suspend_heartbeats(on); }

 private:
  std::unique_ptr<transport::Fabric> inner_;
  GatedChannel agreements_;
};

}  // namespace muster::rpc::testing
