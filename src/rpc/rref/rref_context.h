// SPDX-License-Identifier: BSD-3-Clause
/// One worker's remote references: the protocol's ledger (rref_protocol.h), the values kept here,
/// and their messages through an agent. Users see `rref.h`.
///
/// Thread-safe. No lock is held while messages are sent or values are created or destroyed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "muster/rpc_future.h"
#include "muster/rpc_value.h"
#include "muster/rref.h"
#include "rpc/agent/agent.h"
#include "rpc/rref/rref_protocol.h"

namespace muster::rpc {

/// Message kinds of this layer.
inline constexpr MessageKind kRRefCreate =
    MessageKind::rref_first;  ///< run a function and keep its result
inline constexpr MessageKind kRRefProtocol =
    static_cast<MessageKind>(static_cast<int>(MessageKind::rref_first) + 1);
inline constexpr MessageKind kRRefFetch =
    static_cast<MessageKind>(static_cast<int>(MessageKind::rref_first) + 2);
inline constexpr MessageKind kRRefBackward =
    static_cast<MessageKind>(static_cast<int>(MessageKind::rref_first) + 3);

class RRefContext;
/// A value kept here, or still being created.
using RRefSlot = std::shared_ptr<FutureState<KeptValue>>;

/// A held reference; released with the last shared_ptr to it.
class RRefHandle {
 public:
  RRefHandle(std::shared_ptr<RRefContext> context, RRefReference reference, RRefSlot slot,
             Status failure)
      : context_(std::move(context)),
        reference_(std::move(reference)),
        slot_(std::move(slot)),
        failure_(std::move(failure)) {}
  ~RRefHandle();
  RRefHandle(const RRefHandle&) = delete;

  RRefContext& context() const { return *context_; }
  const RRefReference& reference() const { return reference_; }
  bool is_owner() const { return !reference_.fork; }
  int owner() const { return reference_.rref.owner; }
  /// Null except on the owner.
  const RRefSlot& slot() const { return slot_; }
  /// Why it is unusable, if known when it was received.
  const Status& failure() const { return failure_; }

 private:
  std::shared_ptr<RRefContext> context_;
  RRefReference reference_;
  RRefSlot slot_;
  Status failure_;
};

class RRefContext : public Drain, public std::enable_shared_from_this<RRefContext> {
 public:
  /// Installs the agent's handlers; call before it starts.
  static void install(const std::shared_ptr<Agent>& agent);
  static std::shared_ptr<RRefContext> of(Agent& agent);

  explicit RRefContext(const std::shared_ptr<Agent>& agent);

  /// Throws DistError once the agent is destroyed.
  std::shared_ptr<Agent> agent() const;
  int self() const { return self_; }

  RRefHold keep_here(KeptValue value);
  /// Runs the function `name` on `to`, which keeps the result; `fill` packs the arguments. Does not
  /// block.
  RRefHold create_at(int to, std::string name,
                     const std::function<void(Value&, ValueDelivery&)>& fill,
                     const CallOptions& options);

  /// Write a reference to, or read one from, a call or a reply.
  void save(ValueOutput& archive, const RRefHold& held);
  RRefHold load(ValueInput& archive);

  bool confirmed(const RRefReference& reference) const;
  /// Throws if the reference has failed permanently.
  void check(const RRefHandle& held) const;
  void drop(const RRefReference& reference);

  /// The value of an RRef owned here, by the id another worker gave, possibly before the call that
  /// creates it arrives; null if there is none.
  RRefSlot find(const RRefId& rref);
  /// Number of values kept here.
  std::size_t owned() const;

  void begin() override;
  bool idle() override;
  std::string waits_for() const override;

 private:
  class Keeping;
  struct End;
  RRefSlot slot_of_locked(const RRefId& rref);
  RRefHold hold_locked(const RRefReference& reference, Status failure = {});
  /// Carries out the ledger's effects; releases `lock`. `lost_some`: calls or workers have been
  /// lost.
  void follow(std::unique_lock<std::mutex> lock, bool lost_some = false);
  void on_create(Request request);
  void on_fetch(const Request& request);
  void on_message(const Request& request);
  void on_loss(int worker, const Status& why);
  void lost(const RRefMessage& message);
  void make_here(std::string name, const std::function<void(Value&, ValueDelivery&)>& fill,
                 const RRefHold& held);
  bool is_worker(std::int32_t id) const { return id >= 0 && id < workers_; }
  Result<RRefMessage> read_message(std::string_view bytes, int from) const;

  const int self_;
  const int workers_;
  std::weak_ptr<Agent> agent_;
  mutable std::mutex mutex_;  // guards the following
  RRefLedger ledger_;
  std::map<RRefId, RRefSlot> slots_;
  std::map<RRefReference, Status> failed_;  // until released
  int looks_without_end_ = 0;               // polls of the graceful shutdown with no call in flight
};

/// Runs the requested function; throws if it is not registered on this worker.
void serve_function(Request& request);

void encode_rref(ValueOutput& archive, const RRefId& rref);
RRefId decode_rref(ValueInput& archive);

}  // namespace muster::rpc
