/// One channel: matching of messages with receives, credit, calls compared. Private to
/// `transport/`.
///
/// Peers are job ranks in here; positions in the group are only what the `Channel` interface
/// speaks. A channel may exist before it is opened: then it keeps what came for it. Methods called
/// `..._locked`, and all that links call, want the engine's lock.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "muster/transport/channel.h"
#include "muster/transport/frame.h"
#include "muster/transport/match_table.h"
#include "muster/transport/transfer_state.h"

namespace muster::transport {

class Engine;
class Link;

/// What a sender may have at a receiver, per channel, that no receive has taken: bytes of eager
/// messages, and envelopes of all.
inline constexpr std::size_t kEagerCredit = 256 * 1024;
inline constexpr std::uint32_t kEnvelopeCredit = 4096;

/// A message that no receive has taken yet.
struct Envelope {
  MatchKey key;
  Envelope* next_match = nullptr;
  FrameHeader header;
  std::unique_ptr<std::byte[]> payload;  ///< eager ones
  TransferStateRef local;                ///< a send to oneself, not copied
  std::uint64_t arrival = 0;
};

/// Where the payload that a link reads now belongs: to a receive, to an envelope, or to nobody.
struct Arrival {
  TransferStateRef receive;
  std::unique_ptr<Envelope> envelope;
  bool holds_credit =
      false;  ///< the message counts against its sender until it is taken or dropped
};

class ChannelState final : public Channel {
 public:
  ChannelState(Engine& engine, std::uint32_t id) : engine_(engine), id_(id) {}
  ~ChannelState() override;

  std::uint32_t id() const override { return id_; }
  std::span<const int> members() const override { return members_; }
  int rank() const override { return position_; }
  Fabric& fabric() override;
  TransferRef send(int member, std::uint64_t tag, ConstBytes data,
                   const Fingerprint& call) override;
  TransferRef send_off(int member, std::uint64_t tag, ConstBytes data,
                       const Fingerprint& call) override;
  TransferRef receive(int member, std::uint64_t tag, MutableBytes data, const Fingerprint& call,
                      bool exact) override;
  Taken receive_at_once(int member, std::uint64_t tag, MutableBytes data,
                        const Fingerprint& call) override;
  void cancel(const TransferRef& transfer) override;
  void begin(const Fingerprint& call) override;
  void compare(int member, const Fingerprint& call) override;
  Status failure() const override;
  void fail(Status cause) override;
  std::vector<int> awaited() const override;

  // Life.
  void open_locked(std::vector<int> members);
  bool opened() const { return !members_.empty(); }
  bool has_member(int rank) const { return positions_.contains(rank); }
  /// Ends every transfer with `cause`, for good. False where the channel had failed before.
  bool fail_locked(const Status& cause);
  /// Ends the transfers that only `rank` could complete: it has left.
  void leave_locked(int rank, const Status& cause);
  /// Whether anything here waits for `rank` or wants to reach it.
  bool needs_locked(int rank) const;

  // What links bring. A failure is the peer's fault.
  Result<Arrival> begin_eager(int source, const FrameHeader& header);
  Status end_eager(int source, const FrameHeader& header, Arrival arrival);
  Status on_request(Link& link, const FrameHeader& header);
  Status on_credit(Link& link, const FrameHeader& header);
  void on_withdraw(Link& link, std::uint64_t message);
  void finish(TransferState& transfer, Status status);
  /// Completes a receive whose message (of `header`) is in its buffer.
  void finish_receive(TransferState& transfer, int source, const FrameHeader& header,
                      std::size_t bytes);

 private:
  /// Credit with one peer.
  struct Flow {
    std::size_t eager_left = kEagerCredit;
    std::uint32_t envelopes_left = kEnvelopeCredit;
    std::deque<TransferStateRef> blocked;
    TransferStateRef sent;       // what stands for every message that the stream took at once
    std::size_t eager_held = 0;  // of the peer's credit: given out and not given back
    std::uint32_t envelopes_held = 0;
    std::size_t eager_due = 0;  // taken, to be given back with the next credit frame
    std::uint32_t envelopes_due = 0;
  };
  struct Begun {
    Fingerprint call;
    bool valid = false;
  };
  static constexpr std::size_t kRememberedCalls = 128;

  /// Good until the channel fails. The one asked for last is at hand: a group's messages mostly are
  /// one peer's for a while.
  Flow& flow_with(int rank) {
    if (rank != last_peer_) {
      last_flow_ = &flows_[rank];
      last_peer_ = rank;
    }
    return *last_flow_;
  }
  void forget_flows() {
    flows_.clear();
    last_peer_ = -1;
  }
  TransferRef send(int member, std::uint64_t tag, ConstBytes data, const Fingerprint& call,
                   bool stand_in);
  TransferRef sent(int member);
  TransferStateRef start(bool sends, int member, std::uint64_t tag, const Fingerprint& call);
  static TransferRef refused_in_child(bool sends);
  void post_send(const TransferStateRef& transfer);
  void post_receive(const TransferStateRef& transfer);
  std::size_t send_at_once(int member, std::uint64_t tag, ConstBytes data, const Fingerprint& call);
  FrameHeader eager_header(std::uint64_t tag, std::size_t bytes, const Fingerprint& call) const;
  bool try_send(Flow& flow, const TransferStateRef& transfer);
  void send_local(const TransferStateRef& transfer);
  TransferStateRef match(const MatchKey& key);
  Envelope* find_unexpected(const TransferState& receive) const;
  void take(Envelope* envelope, const TransferStateRef& receive);
  void accept_request(Link& link, const FrameHeader& header, const TransferStateRef& receive);
  Status fit(const TransferState& receive, int source, const FrameHeader& header,
             std::size_t bytes) const;
  static bool within_credit(const Flow& flow, std::size_t eager_bytes);
  static void hold_credit(Flow& flow, std::size_t eager_bytes);
  Status hold_credit(int source, std::size_t eager_bytes);
  void give_credit(int source, std::size_t eager_bytes);
  void give_credit(int source, Flow& flow, std::size_t eager_bytes);
  void keep(std::unique_ptr<Envelope> envelope);
  void drop_unexpected();
  /// After this no buffer of the transfer is touched any more. The link's other side is told where
  /// it must know.
  void release_buffer(TransferState& transfer);
  void unlink(TransferState& transfer);
  std::vector<TransferStateRef> unfinished() const;
  /// False where the calls disagree (the channel has then failed).
  bool check_call(int source, const Fingerprint& call);
  void fail_mismatch(int source, const Fingerprint& theirs, const Fingerprint& ours);
  std::string describe(const Fingerprint& call) const;
  int position_of(int rank) const;

  Engine& engine_;
  const std::uint32_t id_;
  std::vector<int> members_;
  std::unordered_map<int, int> positions_;
  int position_ = -1;
  Status failure_;  // before failed_ is set; never changes after

  MatchTable<TransferState> posted_;      // by their source
  MatchTable<TransferState> posted_any_;  // source -1
  MatchTable<Envelope> unexpected_;
  std::unordered_map<int, Flow> flows_;  // see flow_with(), forget_flows()
  int last_peer_ = -1;                   // of the flow that was last asked for
  Flow* last_flow_ = nullptr;
  std::uint64_t next_order_ = 0;
  TransferState* first_ = nullptr;

  std::vector<Begun> begun_{kRememberedCalls};
  std::uint64_t last_begun_ = 0;
  std::map<std::uint64_t, std::vector<std::pair<int, Fingerprint>>>
      early_;  // calls of others, by sequence, that have not begun here
};

}  // namespace muster::transport
