/// The message protocol of one link as a state machine: bytes in, bytes out; no I/O, no clock, no
/// locks.
///
/// Outgoing frames wait in three queues: control frames overtake messages, messages overtake
/// fragments of large payloads, and fragments take turns between channels and between the payloads
/// of a channel. Payloads are never copied on their way out: `output` gathers headers and pieces of
/// the callers' buffers, and `detach` ends that when a buffer must be given back early. On the way
/// in, `input` says where the next bytes go: small frames through a staging buffer, payloads
/// straight to where the events put them. Whatever comes from the wire is checked before anything
/// is done with it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "muster/base/bytes.h"
#include "muster/base/status.h"
#include "muster/transport/frame.h"

namespace muster::transport {

/// What a link hears. A failure returned from here is a fault of the peer and ends the link.
/// Nothing here may use the link's input.
class LinkEvents {
 public:
  virtual ~LinkEvents() = default;
  /// A checked header of kind eager or data with a payload; says where the payload goes. What does
  /// not fit there is read and dropped.
  virtual Result<MutableBytes> on_payload(const FrameHeader& header) = 0;
  /// A whole frame; for eager and data the payload is where `on_payload` wanted it, else it is
  /// `record`.
  virtual Status on_frame(const FrameHeader& header, ConstBytes record) = 0;
  /// A frame with an owner has been handed to the stream, or its last fragment has. The owner's
  /// buffer is not used any more.
  virtual void on_sent(const std::shared_ptr<void>& owner) = 0;
};

class LinkProtocol {
 public:
  static constexpr std::size_t kMaxPieces = 16;
  using Owner = std::shared_ptr<void>;

  explicit LinkProtocol(LinkEvents& events);

  // In.
  /// Where to read to, in order; the number of pieces. Valid until the next call of anything else
  /// here. `headers_alone`: of a frame that has not begun no more than its header, so that a
  /// payload goes where it belongs at once; that takes more calls.
  std::size_t input(std::array<MutableBytes, 2>& pieces, bool headers_alone = false);
  /// `bytes` have been read into the pieces that `input` named. A failure is final: the peer does
  /// not keep the protocol.
  Status received(std::size_t bytes);
  /// Whether the next byte that comes is the first of a frame.
  bool between_frames() const { return payload_left_ == 0 && staged_end_ == 0 && !broken_; }
  /// The payload under way (if any) goes nowhere from here on.
  void drain_payload() { sink_ = {}; }

  // Out.
  void push_control(const FrameHeader& header, std::string record = {});
  /// Keeps its order with other messages. With an owner, `payload` is its buffer and must stay
  /// until on_sent or `detach`.
  void push_message(const FrameHeader& header, ConstBytes payload = {}, Owner owner = nullptr);
  /// A message of which the stream has taken `written` bytes already, its header included; only
  /// where there is no other output.
  void push_begun(const FrameHeader& header, ConstBytes payload, Owner owner, std::size_t written);
  /// A small message that is copied, and becomes one piece with those gathered before it while
  /// nothing has come between and nothing of them was offered to the stream. How many bytes that
  /// piece has now.
  std::size_t gather_message(const FrameHeader& header, ConstBytes payload);
  /// A large payload (not empty), sent in fragments; `header` is that of the first one.
  void push_stream(const FrameHeader& header, ConstBytes payload, Owner owner);
  bool has_output() const {
    return !committed_.empty() || !control_.empty() || !messages_.empty() || !streams_.empty();
  }
  /// What to write next; the number of pieces.
  std::size_t output(std::array<ConstBytes, kMaxPieces>& pieces);
  /// The stream took `bytes` of what `output` named.
  void sent(std::size_t bytes);
  /// `owner`'s buffer is not read any more afterwards: frames that have not begun are dropped, one
  /// that has begun ends from a copy. No on_sent will come for it.
  struct Detached {
    bool message_dropped = false;  ///< its message will never be sent
    bool stream_cut = false;       ///< the last fragment will never be sent
  };
  Detached detach(const void* owner);
  /// Whether a frame of this kind waits among the control frames.
  bool queued(FrameKind kind) const;

 private:
  struct OutFrame {
    FrameHeader header;
    ConstBytes payload;
    std::string copy;  // holds the payload where it is our own
    Owner owner;
    bool last = true;       // of its owner
    bool gathered = false;  // the copy holds whole messages, their headers too
    std::size_t size() const { return gathered ? copy.size() : sizeof header + header.length; }
  };
  struct OutStream {
    FrameHeader header;
    ConstBytes payload;
    std::size_t at = 0;
    Owner owner;
  };
  /// The large payloads of one channel; the first is next.
  struct ChannelStreams {
    std::uint32_t channel = 0;
    std::deque<OutStream> waiting;
  };

  void commit();
  void commit_message();
  void commit_fragment();
  void account(OutFrame& frame);
  Status parse();
  Status start_frame();
  Status finish_frame();
  std::size_t place(ConstBytes bytes);

  LinkEvents& events_;

  // In: either a payload is under way (payload_left_ > 0) and goes to sink_, then to nowhere; or a
  // header is being gathered in staging_.
  static constexpr std::size_t kStagingBytes = kEagerBytes + 8 * sizeof(FrameHeader);
  std::unique_ptr<std::byte[]> staging_;
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;
  FrameHeader header_;
  std::size_t payload_left_ = 0;
  MutableBytes sink_;
  std::string record_;
  bool broken_ = false;

  // Out: what is committed has its place in the byte stream.
  std::deque<OutFrame> committed_;
  std::size_t committed_bytes_ = 0;
  std::size_t written_ = 0;  // of the first committed frame, header included
  std::deque<OutFrame> control_;
  std::deque<OutFrame> messages_;
  std::string spare_;  // memory of gathered messages that have been written
  std::deque<ChannelStreams> streams_;
  std::size_t messages_in_a_row_ = 0;  // bytes committed since the last fragment
};

}  // namespace muster::transport
