/// What the agent's files share. Private to them.
#pragma once

#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "muster/group/errors.h"
#include "muster/rpc/agent.h"

namespace muster::rpc {

inline constexpr std::uint64_t kHeadTag = 0;
/// Nothing is ever sent under it: the receive that waits for it ends with the peer.
inline constexpr std::uint64_t kSentinelTag = ~std::uint64_t{0};

struct Agent::Slot {
  transport::TransferRef transfer;
  std::unique_ptr<std::byte[]> buffer;
};

struct Agent::Peer {
  std::atomic<std::uint64_t> next_tag{1};
  std::atomic<bool> known{false};  // has a sentinel, or needs none
  std::atomic<bool> gone{false};
  transport::TransferRef sentinel;  // under look_mutex_
  Status why;                       // under calls_mutex_, before `gone`
};

/// Memory for what a peer has promised. Nothing is written to it before that has come: a promise
/// alone takes addresses, not memory.
struct PromisedBytes {
  std::unique_ptr<std::byte[]> data;  ///< null: none, or there are not as many addresses
  std::size_t size = 0;

  PromisedBytes() = default;
  explicit PromisedBytes(std::size_t size) : data(new (std::nothrow) std::byte[size]), size(size) {}
  MutableBytes bytes() { return {data.get(), size}; }
};

/// A message that is too large for its head, until all of it is there.
struct Agent::Inbound {
  int from = -1;
  bool head_only = false;    // what comes is the long head
  PromisedBytes head_bytes;  // the head's views point here
  PromisedBytes payload;     // a long one, until it is the parcel's
  Head head;
  Parcel parcel;
  std::vector<TensorIn> tensors;  // as many as the head's, with memory for those that come
  std::vector<transport::TransferRef> transfers;

  bool arrived() const {
    for (const auto& transfer : transfers) {
      if (!transfer->done()) return false;
    }
    return true;
  }
};

/// A message until all of it is sent: what its bytes lie in.
struct Agent::Outbound {
  int to = -1;
  std::uint64_t call = 0;
  bool is_call = false;  // ours; else an answer, or it wants none
  EncodedMessage encoded;
  std::string payload;
  std::vector<TensorOut> tensors;
  std::shared_ptr<Passage> passage;
  std::uint64_t first_tag = 0;
  std::vector<transport::TransferRef> transfers;

  bool sent() const {
    for (const auto& transfer : transfers) {
      if (!transfer->done()) return false;
    }
    return true;
  }
};

/// While it lives the agent does not end. False where it has ended.
class Agent::Use {
 public:
  explicit Use(Agent& agent) : agent_(agent) {
    agent_.users_.fetch_add(1);
    running_ = agent_.state_.load() != State::stopped;
  }
  ~Use() { agent_.users_.fetch_sub(1); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  explicit operator bool() const { return running_; }

 private:
  Agent& agent_;
  bool running_ = false;
};

/// The answer to one request.
class Agent::Answering final : public Responder,
                               public std::enable_shared_from_this<Agent::Answering> {
 public:
  Answering(std::shared_ptr<Agent> agent, int from, std::uint64_t call,
            std::shared_ptr<Passage> arguments)
      : agent_(std::move(agent)), from_(from), call_(call), arguments_(std::move(arguments)) {
    agent_->unanswered_.fetch_add(1, std::memory_order_relaxed);
  }
  ~Answering() override;

  void reply(const std::function<void(Value&, Passage&)>& fill) override;
  void fail(std::exception_ptr error) override;
  bool cancelled() const override { return cancelled_.load(std::memory_order_relaxed); }

  void cancel() { cancelled_.store(true, std::memory_order_relaxed); }
  /// Nobody wants an answer: none will be sent.
  void forget() {
    if (!answered_.exchange(true)) finish();
  }
  void set_scope(std::shared_ptr<Observer::Scope> scope) { scope_ = std::move(scope); }
  void set_listed() { listed_ = true; }

 private:
  void finish();
  void send_error(const std::exception_ptr& error) noexcept;
  bool ready() const;

  std::shared_ptr<Agent> agent_;
  const int from_;
  const std::uint64_t call_;
  std::shared_ptr<Passage> arguments_;
  std::shared_ptr<Observer::Scope> scope_;
  bool listed_ = false;  // in the agent's list of what is served
  std::atomic<bool> answered_{false};
  std::atomic<bool> cancelled_{false};
};

}  // namespace muster::rpc
