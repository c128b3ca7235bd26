/// One peer of the job: the stream to it, its protocol and the messages under way. Private to
/// `transport/`; under the engine's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "muster/base/clock.h"
#include "muster/transport/byte_stream.h"
#include "muster/transport/channel_state.h"
#include "muster/transport/link_protocol.h"

namespace muster::transport {

class Engine;

class Link final : public LinkEvents {
 public:
  Link(Engine& engine, int peer) : protocol(*this), engine_(engine), peer_(peer) {}

  int peer() const { return peer_; }
  bool up() const { return stream != nullptr; }

  /// Reads and writes what is possible now, within a share of one pass. True where anything moved.
  bool read_some();
  bool write_some();
  /// Hands a frame straight to the stream where nothing else waits to be written. How much of it
  /// was taken: none, a part (the rest is for the protocol, `push_begun`) or all.
  std::size_t write_at_once(const FrameHeader& header, ConstBytes payload);

  /// Takes the next message of the stream into `data` where its header is `expected` and all of it
  /// has come; else leaves all as it is.
  Taken take_at_once(const FrameHeader& expected, MutableBytes data);

  // Messages that ask first.
  std::uint64_t add_request(const TransferStateRef& send);
  void forget_request(std::uint64_t message) { requests.erase(message); }
  /// A receive takes message `message` of the peer, `bytes` long.
  void expect(std::uint64_t message, std::uint32_t channel, std::size_t bytes,
              const FrameHeader& header, const TransferStateRef& receive);
  /// What still comes for `receive` goes nowhere.
  void abandon(const TransferState& receive);
  bool busy() const { return !requests.empty() || !incoming.empty() || protocol.has_output(); }

  Result<MutableBytes> on_payload(const FrameHeader& header) override;
  Status on_frame(const FrameHeader& header, ConstBytes record) override;
  void on_sent(const std::shared_ptr<void>& owner) override;

  struct Incoming {
    TransferStateRef receive;  // null: drains
    FrameHeader header;        // of the request
    std::size_t bytes = 0;
    std::size_t got = 0;
  };

  LinkProtocol protocol;
  std::unique_ptr<ByteStream> stream;
  std::unordered_map<std::uint64_t, TransferStateRef> requests;  // ours, by message id
  std::unordered_map<std::uint64_t, Incoming> incoming;          // the peer's, by its message id
  bool connecting = false;
  bool dirty = false;          // in the engine's list of links with something to write
  bool holds = false;          // in the engine's list of links with gathered messages
  bool stuck = false;          // the stream took less than it was offered
  bool goodbye = false;        // the peer has said it
  bool unclosed = false;       // and that it had not closed its groups
  bool farewell = false;       // the peer has answered ours
  bool in_service = false;     // its protocol stands on the stack
  std::uint32_t interest = 0;  // epoll events that the engine asked for
  TimePoint heard{};
  TimePoint last_message{};  // a message or a part of one
  TimePoint asked{};         // of the oldest ping without an answer; zero: none
  Status ended;              // why the stream is no more
  Status write_failure;      // the stream takes nothing more; what it still gives is read first

 private:
  bool header_alone() const;
  Result<MutableBytes> on_data_payload(const FrameHeader& header);
  Status on_data(const FrameHeader& header);
  Status on_clear(const FrameHeader& header);
  Status on_withdraw(const FrameHeader& header);
  Status on_refuse(const FrameHeader& header);

  Engine& engine_;
  const int peer_;
  std::uint64_t next_message_ = 1;
  Arrival arrival_;
};

}  // namespace muster::transport
