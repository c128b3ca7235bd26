/// One channel as its users see it, and its lifetime. Private to `transport/`.
///
/// A channel may exist before it is opened; it then keeps the messages that arrive for it. Methods
/// named `..._locked` require the engine's lock; the `Channel` interface acquires it.
#pragma once

#include <vector>

#include "core/transport/channel/channel_core.h"
#include "core/transport/channel/channel_receiver.h"
#include "core/transport/channel/channel_sender.h"
#include "core/transport/engine/pass_loop.h"

namespace muster::transport {

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

}  // namespace muster::transport
