// SPDX-License-Identifier: BSD-3-Clause
/// The channels of one rank and their ids. Private to `transport/`; under the engine's lock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/transport/channel/channel_core.h"
#include "core/transport/engine/pass_loop.h"

namespace muster::transport {

/// One channel as its users see it, and its lifetime.
///
/// A channel may exist before it is opened; it then keeps the messages that arrive for it. Methods
/// named `..._locked` require the engine's lock; the `Channel` interface acquires it.
class ChannelState final : public Channel {
 public:
  ChannelState(EngineContext& engine, Links& links, PassLoop& loop, std::uint32_t id)
      : loop_(loop), core_(engine, links, id) {}

  std::uint32_t id() const override { return core_.id; }
  std::span<const int> members() const override { return core_.members; }
  int rank() const override { return position_; }
  Fabric& fabric() override { return *core_.engine.fabric; }
  TransferRef send(int member, std::uint64_t tag, ConstBytes data,
                   const Fingerprint& call) override {
    return send(member, tag, data, call, true);
  }
  TransferRef try_send_inline(int member, std::uint64_t tag, ConstBytes data,
                              const Fingerprint& call) override {
    return send(member, tag, data, call, false);
  }
  TransferRef receive(int member, std::uint64_t tag, MutableBytes data, const Fingerprint& call,
                      bool exact) override;
  TryReceive try_receive(int member, std::uint64_t tag, MutableBytes data,
                         const Fingerprint& call) override;
  void cancel(const TransferRef& transfer) override;
  void begin(const Fingerprint& call) override;
  void compare(int member, const Fingerprint& call) override;
  Status failure() const override { return failed() ? core_.failure : Status(); }
  void fail(Status cause) override;
  void leave(int member, const Status& cause) override;
  std::vector<int> awaited() const override;

  void open_locked(std::vector<int> members);
  /// Ends every transfer with `cause`, for good. False if the channel had failed before.
  bool fail_locked(const Status& cause);
  /// Ends the transfers that only `rank` could complete, because it is gone.
  void leave_locked(int rank, const Status& cause);
  /// Whether anything here waits for `rank` or wants to reach it.
  bool needs_locked(int rank) const { return core_.transfers.needs(rank); }
  bool has_member(int rank) const { return core_.has_member(rank); }

  // For links.
  ChannelCore& core() { return core_; }
  ChannelReceiver& receiver() { return receiver_; }
  ChannelSender& sender() { return sender_; }

 private:
  TransferRef send(int member, std::uint64_t tag, ConstBytes data, const Fingerprint& call,
                   bool wants_transfer);
  /// Ends it with `cause`, and touches its buffer no more.
  void end(TransferState& transfer, const Status& cause);

  PassLoop& loop_;
  int position_ = -1;
  ChannelCore core_;
  ChannelReceiver receiver_{core_};
  ChannelSender sender_{core_, receiver_};
};

class ChannelTable {
 public:
  using Map = std::unordered_map<std::uint32_t, std::shared_ptr<ChannelState>>;

  ChannelTable(EngineContext& engine, Links& links, PassLoop& loop)
      : engine_(engine), links_(links), loop_(loop) {}

  /// Makes the channels of all ranks. Once.
  void start();
  /// Channel 0.
  ChannelState& bootstrap() { return *bootstrap_; }
  /// The channel that survives the death of ranks (`Fabric::agreements`).
  ChannelState& agreements() { return *agreements_; }
  bool is_agreements(const std::shared_ptr<ChannelState>& channel) const {
    return channel == agreements_;
  }

  Result<std::shared_ptr<ChannelState>> open(std::uint32_t id, std::vector<int> members);
  /// The last user has released the channel.
  void retire(std::uint32_t id);
  /// An id that no rank has allocated before and this one has not used. 0 once all are used up.
  std::uint32_t next_id();

  /// Null where there is none.
  ChannelState* find(std::uint32_t id) const;
  /// The channel of an id in a frame: created if it may still be opened, null if it has ended.
  /// Fails if the peer has named too many unopened channels.
  Result<ChannelState*> for_frame(std::uint32_t id);
  const Map& all() const { return channels_; }
  void fail_all(const Status& cause);
  /// Whether a channel waits for `rank` or wants to reach it.
  bool needs(int rank) const;
  void clear();

 private:
  static constexpr std::uint32_t kAgreements = ~std::uint32_t{0};
  // Limit of channels that frames may name before they are opened here; honest peers stay far below
  // it.
  static constexpr std::size_t kMaxUnopened = 4096;  // limit: memory

  Status check_members(const std::vector<int>& members) const;
  bool was_used(std::uint32_t id) const;
  void note_used(std::uint32_t id);
  std::shared_ptr<ChannelState> make(std::uint32_t id) const {
    return std::make_shared<ChannelState>(engine_, links_, loop_, id);
  }

  EngineContext& engine_;
  Links& links_;
  PassLoop& loop_;
  Map channels_;
  std::size_t unopened_ = 0;
  std::map<std::uint32_t, std::uint32_t> used_ids_;  // runs: first -> last
  std::uint32_t given_ids_ = 0;  // number of ids allocated from this rank's own range
  std::shared_ptr<ChannelState> bootstrap_;
  std::shared_ptr<ChannelState> agreements_;
};

}  // namespace muster::transport
