/// Orders the outgoing frames of one link and turns them into bytes: no I/O, no clock, no locks.
/// Private to `transport/`.
///
/// Frames wait in three queues: control frames overtake messages, messages overtake fragments of
/// large payloads, and fragments take turns between channels and between the payloads of a channel.
/// Payloads are never copied: `output` gathers headers and pieces of the callers' buffers, and
/// `detach` ends that when a buffer must be given back early.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "core/base/bytes.h"
#include "core/transport/link/frame.h"
#include "core/transport/link/link_events.h"

namespace muster::transport {

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
  /// What to write next; the number of pieces.
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

}  // namespace muster::transport
