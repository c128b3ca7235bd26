// SPDX-License-Identifier: BSD-3-Clause
/// The message protocol of one link as a state machine: bytes in, bytes out; no I/O, no clock, no
/// locks. Private to `transport/`. `docs/internals/transport.md` describes the whole protocol.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/bytes.h"
#include "core/transport/channel/channel.h"
#include "core/transport/channel/fingerprint.h"
#include "core/tunables/tunables.h"
#include "muster/status.h"

namespace muster::transport {

// The frames of the message protocol: one fixed header, then `length` bytes of payload.
// `docs/internals/transport.md` describes the whole protocol.

/// Large payloads are cut into fragments of this size.
using fixed::kFragmentBytes;
/// Largest payload of a frame that carries a record (a cause of failure).
inline constexpr std::size_t kRecordBytes = 8 * 1024;  // limit: of a sentence

/// Raised with every change of a frame: ranks of two versions do not meet.
inline constexpr int kFrameVersion = 3;  // limit: a version

enum class FrameKind : std::uint8_t {
  eager = 1,  ///< a whole message: tag, call, payload
  request,    ///< announces a large message: tag, call, message id, amount = its bytes
  clear,      ///< the receiver waits for the message: message id
  data,       ///< a fragment: message id, amount = where it starts, payload
  withdraw,   ///< the sender cancels the message: message id
  refuse,     ///< the receiver does not want the message: message id
  credit,     ///< returned credit of a channel: amount = bytes of eager messages, tag = envelopes
  channel_failure,  ///< the channel has failed: a cause
  rank_failure,     ///< a rank is lost: message = that rank, amount = 1: it says so itself, 2: it
                    ///< will end without closing its groups, and says what went wrong; and a cause
  ping,             ///< asks for an answer
  pong,
  close,      ///< nothing more will come; amount = 1: the sender's process ended and had not closed
              ///< its groups
  close_ack,  ///< the answer to a close: everything before it was read
};
inline constexpr std::uint8_t kLastFrameKind = static_cast<std::uint8_t>(FrameKind::close_ack);

/// Copied to the wire as it is.
struct FrameHeader {
  static constexpr std::uint8_t kMark = 0xa7;

  std::uint32_t length = 0;  ///< payload bytes that follow
  FrameKind kind = FrameKind::ping;
  std::uint8_t mark = kMark;  ///< if it is missing, the stream is out of sync
  std::uint16_t zero = 0;
  std::uint32_t channel = 0;
  std::uint32_t zero_too = 0;
  std::uint64_t tag = 0;
  std::uint64_t message = 0;
  std::uint64_t amount = 0;
  Fingerprint call;
};
static_assert(sizeof(FrameHeader) == 72);

const char* name_of(FrameKind kind);

/// Whether a header from the wire is one that this version may send: mark, kind, lengths. The
/// fabric checks its ids.
Status check_header(const FrameHeader& header);

/// A cause of failure as a record: code, ranks at fault, text. Long texts are cut, so that it fits
/// into kRecordBytes.
std::string encode_cause(const Status& cause);
/// Empty if the record is invalid (an unknown code, ranks outside the job).
std::optional<Status> decode_cause(std::string_view record, int world_size);

/// A link's input events. A failure returned from here is a fault of the peer and ends the link.
/// The functions must not use the link's input.
class LinkEvents {
 public:
  virtual ~LinkEvents() = default;
  /// A checked header of kind eager or data with a payload. Returns where the payload goes; bytes
  /// that do not fit are read and dropped.
  virtual Result<MutableBytes> on_payload(const FrameHeader& header) = 0;
  /// A whole frame; for eager and data the payload is where `on_payload` wanted it, else it is
  /// `record`.
  virtual Status on_frame(const FrameHeader& header, ConstBytes record) = 0;
  /// A frame with an owner has been handed to the stream, or its last fragment has. The owner's
  /// buffer is not used any more.
  virtual void on_sent(const std::shared_ptr<void>& owner) = 0;
};

/// Cuts the incoming bytes of one link into frames: bytes in, events out; no I/O, no clock, no
/// locks.
///
/// `input` says where the next bytes go: small frames through a staging buffer, payloads straight
/// to where the events put them. All input is checked before it is used.
class FrameReader {
 public:
  explicit FrameReader(LinkEvents& events);

  /// Fills in the memory to read to, in order, and returns the number of pieces. Valid until the
  /// next call of anything else here. `headers_alone`: reads only the header of a frame that has
  /// not begun, so that its payload is read directly to its destination; takes more calls.
  std::size_t input(std::array<MutableBytes, 2>& pieces, bool headers_alone = false);
  /// `bytes` have been read into the pieces that `input` named. A failure is final: the peer does
  /// not keep the protocol.
  Status received(std::size_t bytes);
  /// Whether the next byte that comes is the first of a frame.
  bool between_frames() const { return payload_left_ == 0 && staged_end_ == 0 && !broken_; }
  /// Drops the rest of the payload being read, if any.
  void drain_payload() { sink_ = {}; }

 private:
  Status parse();
  Status start_frame();
  Status finish_frame();
  std::size_t place(ConstBytes bytes);

  LinkEvents& events_;

  // Either a payload is under way (payload_left_ > 0) and goes to sink_, then to nowhere; or a
  // header is being gathered in staging_.
  static constexpr std::size_t kStagingBytes = kEagerBytes + 8 * sizeof(FrameHeader);
  std::unique_ptr<std::byte[]> staging_;
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;
  FrameHeader header_;
  std::size_t payload_left_ = 0;
  MutableBytes sink_;
  std::string record_;
  bool broken_ = false;  // for good: what follows a wrong frame has no known beginning
};

/// Orders the outgoing frames of one link and turns them into bytes: no I/O, no clock, no locks.
///
/// Frames wait in three queues: control frames overtake messages, messages overtake fragments of
/// large payloads, and fragments take turns between channels and between the payloads of a channel.
/// Payloads are never copied: `output` gathers headers and pieces of the callers' buffers, and
/// `detach` ends that when a buffer must be given back early.
class FrameWriter {
 public:
  static constexpr std::size_t kMaxPieces = 16;
  using Owner = std::shared_ptr<void>;

  explicit FrameWriter(LinkEvents& events) : events_(events) {}

  void push_control(const FrameHeader& header, std::string record = {});
  /// Keeps its order with other messages. With an owner, `payload` is its buffer and must stay
  /// until on_sent or `detach`.
  void push_message(const FrameHeader& header, ConstBytes payload = {}, Owner owner = nullptr);
  /// A message of which the stream has taken `written` bytes already, its header included; only
  /// where there is no other output.
  void push_begun(const FrameHeader& header, ConstBytes payload, Owner owner, std::size_t written);
  /// Copies a small message. It is merged with messages gathered just before it, if no other frame
  /// was queued in between and none of their bytes has been offered to the stream. Returns the size
  /// of the merged piece in bytes.
  std::size_t gather_message(const FrameHeader& header, ConstBytes payload);
  /// A large payload (not empty), sent in fragments; `header` is that of the first one.
  void push_stream(const FrameHeader& header, ConstBytes payload, Owner owner);
  bool has_output() const {
    return !committed_.empty() || !control_.empty() || !messages_.empty() || !streams_.empty();
  }
  /// Fills in the bytes to write next, in order, and returns the number of pieces.
  std::size_t output(std::array<ConstBytes, kMaxPieces>& pieces);
  /// The stream took `bytes` of what `output` named.
  void sent(std::size_t bytes);
  /// Afterwards `owner`'s buffer is no longer read: frames that have not begun are dropped, and one
  /// that has begun is finished from a copy. on_sent is not called for it.
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
    std::string copy;  // the payload, if it is a private copy
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

  LinkEvents& events_;
  // Committed frames have a fixed position in the byte stream.
  std::deque<OutFrame> committed_;
  std::size_t committed_bytes_ = 0;
  std::size_t written_ = 0;  // of the first committed frame, header included
  std::deque<OutFrame> control_;
  std::deque<OutFrame> messages_;
  std::string spare_;  // memory of gathered messages that have been written
  std::deque<ChannelStreams> streams_;
  std::size_t messages_in_a_row_ = 0;  // bytes committed since the last fragment
};

/// The message protocol of one link as a state machine: bytes in, bytes out.
struct LinkProtocol {
  explicit LinkProtocol(LinkEvents& events) : in(events), out(events) {}

  FrameReader in;
  FrameWriter out;
};

}  // namespace muster::transport
