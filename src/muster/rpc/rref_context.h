/// Remote references of one worker: the protocol's ledger (rref_protocol.h), the values that live
/// here, and the messages between them and an agent. Users see `rref.h`.
///
/// Thread-safe. No lock is held while messages are sent, values are made or let go.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "muster/rpc/agent.h"
#include "muster/rpc/future.h"
#include "muster/rpc/kept_value.h"
#include "muster/rpc/rref_protocol.h"

namespace muster::rpc {

/// Kinds of messages of this layer.
inline constexpr Kind kRRefCreate = Kind::rref_first;  ///< run a function, keep its result
inline constexpr Kind kRRefProtocol = static_cast<Kind>(static_cast<int>(Kind::rref_first) + 1);
inline constexpr Kind kRRefFetch = static_cast<Kind>(static_cast<int>(Kind::rref_first) + 2);
inline constexpr Kind kRRefBackward = static_cast<Kind>(static_cast<int>(Kind::rref_first) + 3);

class RRefContext;
/// A value that is kept here, or still being made.
using RRefSlot = std::shared_ptr<FutureState<KeptValue>>;

/// A reference that is held; let go with the last copy of the shared pointer to it.
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
  /// On the owner; else null.
  const RRefSlot& slot() const { return slot_; }
  /// Why it is of no use, where that was known when it came.
  const Status& failure() const { return failure_; }

 private:
  std::shared_ptr<RRefContext> context_;
  RRefReference reference_;
  RRefSlot slot_;
  Status failure_;
};
using RRefHold = std::shared_ptr<RRefHandle>;

class RRefContext : public Drain, public std::enable_shared_from_this<RRefContext> {
 public:
  /// Gives the agent its handlers; before it starts.
  static void install(const std::shared_ptr<Agent>& agent);
  static std::shared_ptr<RRefContext> of(Agent& agent);

  explicit RRefContext(const std::shared_ptr<Agent>& agent);

  /// Throws DistError once the agent is gone.
  std::shared_ptr<Agent> agent() const;
  int self() const { return self_; }

  RRefHold keep_here(KeptValue value);
  /// Has `to` run the function `name` and keep what it returns; `fill` packs the arguments. Does
  /// not wait.
  RRefHold create_at(int to, std::string name, const std::function<void(Value&, Passage&)>& fill,
                     const CallOptions& options);

  /// A reference on its way into or out of a call or an answer.
  void save(ValueOutput& archive, const RRefHold& held);
  RRefHold load(ValueInput& archive);

  bool confirmed(const RRefReference& reference) const;
  /// Throws where it will never be good again.
  void check(const RRefHandle& held) const;
  void drop(const RRefReference& reference);

  /// The value of an RRef here that another worker named by its id, perhaps before the call that
  /// makes it has come; null where there is none.
  RRefSlot find(const RRefId& rref);
  /// Values kept here.
  std::size_t owned() const;

  void begin() override;
  bool idle() override;
  std::string waits_for() const override;

 private:
  class Keeping;
  struct End;
  RRefSlot slot_of_locked(const RRefId& rref);
  RRefHold hold_locked(const RRefReference& reference, Status failure = {});
  /// Does what the ledger has decided; `lock` is released. `lost_some`: calls or workers have been
  /// lost.
  void follow(std::unique_lock<std::mutex> lock, bool lost_some = false);
  void on_create(Request request);
  void on_fetch(const Request& request);
  void on_message(const Request& request);
  void on_loss(int worker, const Status& why);
  void lost(const RRefMessage& message);
  void make_here(std::string name, const std::function<void(Value&, Passage&)>& fill,
                 const RRefHold& held);
  bool is_worker(std::int32_t id) const { return id >= 0 && id < workers_; }
  Result<RRefMessage> read_message(std::string_view bytes, int from) const;

  const int self_;
  const int workers_;
  std::weak_ptr<Agent> agent_;
  mutable std::mutex mutex_;
  RRefLedger ledger_;
  std::map<RRefId, RRefSlot> slots_;
  std::map<RRefReference, Status> failed_;  // until let go
  int looks_without_end_ = 0;               // of the graceful end, with no call under way
};

/// Throws where nothing of the kind is registered on this worker; else runs it on the request.
void serve_function(Request& request);

void encode_rref(ValueOutput& archive, const RRefId& rref);
RRefId decode_rref(ValueInput& archive);

}  // namespace muster::rpc
